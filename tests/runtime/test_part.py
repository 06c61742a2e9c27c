"""State dicts of parts of a model: a file with one rank's shards is not loaded into another rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.runtime.models import make, mean_square
from tests.runtime.ranks import Ranks
from tests.runtime.training import DP
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


@captured_once()
def loaded_from_the_first(file: Path, recipe: str, whole: bool) -> tuple[str, float]:
    """The error of loading what rank 0 alone has saved, and the distance of the parameters from those saved."""
    model, batch, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, mesh=DP, recipe=recipe)
    made.step(*batch)
    state = made.state_dict()
    if whole:
        state = {name: x.full_tensor() for name, x in state.items()}
    if dist.get_rank() == 0:
        torch.save(state, file)
    dist.barrier()
    before = {name: x.to_local().clone() for name, x in made.named_parameters()}
    try:
        made.load_state_dict(torch.load(file, weights_only=False))
    except autopar.StepError as error:
        return str(error), 0.0
    now = dict(made.named_parameters())
    return "", max((now[n].to_local() - x).abs().max().item() for n, x in before.items())


def test_another_ranks_shards_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(loaded_from_the_first, tmp_path / "shards.pt", "zero3", False)
    assert first == ("", 0.0)
    assert second[0].startswith(
        "load_state_dict on rank 1 was given the state dict of rank 0, whose"
    )
    assert "save_checkpoint" in second[0]


@pytest.mark.parametrize(("recipe", "whole"), [("zero3", True), ("ddp", False)])
def test_whole_parameters_of_one_rank_are_loaded_by_all(
    two_ranks: Ranks, tmp_path: Path, recipe: str, whole: bool
) -> None:
    found = two_ranks.run(loaded_from_the_first, tmp_path / "whole.pt", recipe, whole)
    assert found == [("", 0.0), ("", 0.0)]
