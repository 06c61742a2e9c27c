"""State dicts of parts of a model: one rank's shards are not saved as the model, nor loaded into another rank."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make, mean_square
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
        torch.save(state if whole or recipe == "ddp" else state.shards(), file)  # type: ignore[attr-defined]
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
    assert second[0].startswith("load_state_dict on rank 1 was given the state dict of rank 0, whose")
    assert "save_checkpoint" in second[0]


@pytest.mark.parametrize(("recipe", "whole"), [("zero3", True), ("ddp", False)])
def test_whole_parameters_of_one_rank_are_loaded_by_all(
    two_ranks: Ranks, tmp_path: Path, recipe: str, whole: bool
) -> None:
    found = two_ranks.run(loaded_from_the_first, tmp_path / "whole.pt", recipe, whole)
    assert found == [("", 0.0), ("", 0.0)]


@captured_once()
def saved_by_a_script(options: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """The errors of `torch.save` on this rank; whether a plain model loads the files; whether copies are the state."""
    model, batch, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, **options)
    made.step(*batch)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0, momentum=0.9)
    optimizer.step()
    state, files, errors = made.state_dict(), [], []
    copies = copy.deepcopy(state), copy.copy(state), tree_map(torch.clone, state)
    are_alike = all(list(each) == list(state) and type(each) is type(state) for each in copies)
    for each in (state, dict(state), {n: x.clone() for n, x in state.items()}, optimizer.state_dict()):
        file = io.BytesIO()
        try:
            torch.save({"model": each, "step": 1}, file)
        except autopar.StepError as error:
            errors.append(str(error))
        else:
            files.append(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["model"])
    plain, found = make("mlp")[0], []
    for each in files[:3]:
        plain.load_state_dict(each)
        gaps = [made.get_parameter(n).full_tensor() - p for n, p in plain.named_parameters()]  # type: ignore[attr-defined]
        found.append(not any(gap.any() for gap in gaps))
    return errors, found == [True] * 3, are_alike


def test_torch_save_takes_whole_tensors_and_refuses_shards(two_ranks: Ranks) -> None:
    assert two_ranks.run(saved_by_a_script, {"mesh": DP, "recipe": "ddp"}) == [([], True, True)] * 2
    for options in ({"mesh": DP, "recipe": "zero3"}, {"mesh": DP, "recipe": "zero1"}, {"mesh": {"pp": 2}}):
        for errors, _, are_alike in two_ranks.run(saved_by_a_script, options):
            assert len(errors) == 4
            assert all("ranks that save under one name overwrite each other" in e for e in errors)
            assert all("save_checkpoint" in e for e in errors) and are_alike


# --- copies


@captured_once()
def averaged_before_its_plan() -> str:
    made = autopar.compile(make("mlp")[0], loss_fn=mean_square, mesh=DP, recipe="zero3")
    with pytest.raises(autopar.StepError) as refused:
        torch.optim.swa_utils.AveragedModel(made)
    copy.deepcopy(made)  # one that trains apart
    return str(refused.value)


def test_averages_of_a_model_without_a_plan_are_refused(two_ranks: Ranks) -> None:
    for refused in two_ranks.run(averaged_before_its_plan):
        assert "AveragedModel was given a model that has no plan yet" in refused
        assert "AveragedModel(model.original)" in refused


@captured_once()
def averaged(options: dict[str, Any]) -> tuple[str, list[float]]:
    """The refusal of a copy of the compiled module; by how much averages differ from half of two states."""
    model, batch, _ = make("mlp")
    made = autopar.compile(model, loss_fn=mean_square, example_inputs=batch, **options)
    with pytest.raises(autopar.StepError) as refused:
        copy.deepcopy(made)
    mean = torch.optim.swa_utils.AveragedModel(made.original, avg_fn=lambda a, p, _: (a + p) / 2)
    mean.update_parameters(made)  # the first takes the values
    before = [p.detach().clone() for p in made.parameters()]
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(3)
    mean.update_parameters(made)
    pairs = zip(mean.module.parameters(), before, strict=True)
    return str(refused.value), [(p - q * 2).full_tensor().abs().max().item() for p, q in pairs]  # type: ignore[attr-defined]


def test_a_model_in_shards_is_averaged_by_its_original(two_ranks: Ranks) -> None:
    for options in ({"mesh": DP, "recipe": "zero1"}, {"mesh": {"pp": 2}}):
        for refused, gaps in two_ranks.run(averaged, options):
            assert "AveragedModel(model.original) averages" in refused
            assert gaps == [0.0] * 4


def copied_before_the_plan() -> str:
    with pytest.raises(autopar.StepError) as refused:
        copy.deepcopy(autopar.compile(make("mlp")[0], loss_fn=mean_square, mesh={"pp": 2}))
    twin = copy.deepcopy(autopar.compile(make("mlp")[0], loss_fn=mean_square, mesh=DP))
    return f"{type(twin).__name__}: {refused.value}"


def test_a_copy_that_would_have_all_stages_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(copied_before_the_plan):
        assert message.startswith("CompiledModule: A compiled module was to be copied (copy.deepcopy,")
