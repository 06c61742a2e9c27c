"""Widths, heads and a vocabulary that the ranks do not divide: three real ranks train as one process does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from tests.runtime.checkpoint.test_checkpoints import gap, half, in_one_process
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import compiled, difference, single
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

TP = {"tp": 3}


@pytest.mark.parametrize("recipe", ["tp", pytest.param("tp+sp", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_three_ranks_train_as_one_process(three_ranks: Ranks, recipe: str, micro_batches: int) -> None:
    expected = single("odd widths", steps=5)
    for found in three_ranks.run(_five_steps, recipe, micro_batches):
        assert difference(found, expected) < 1e-9


def _five_steps(recipe: str, micro_batches: int) -> dict[str, object]:
    return compiled("odd widths", TP, recipe, micro_batches, steps=5)


@captured_once()
def parts() -> dict[str, tuple[str, list[int]]]:
    """How a rank uses each parameter between the steps of tensor parallelism, and the shape of its part."""
    model, batch, loss_fn = make("odd widths")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=TP, recipe="tp", example_inputs=batch)  # type: ignore[arg-type]
    kept = {name: str(how.resident[0]) for name, how in made.plan.parameters.items()}
    local = {name: p.to_local().shape for name, p in made.named_parameters() if isinstance(p, DTensor)}
    return {name: (state, list(local[name])) for name, state in kept.items()}


def test_a_rank_has_its_part_of_every_width_at_rest_and_in_use(three_ranks: Ranks) -> None:
    found = three_ranks.run(parts)
    for name, width, dim in (("table.weight", 97, 0), ("up.weight", 97, 0), ("up.bias", 97, 0), ("down.weight", 97, 1)):
        sizes = [len(part) for part in torch.arange(width).chunk(3)]
        assert [each[name][1][dim] for each in found] == sizes
        assert all(each[name][0] == f"S({dim})" for each in found)


def test_a_checkpoint_goes_from_three_ranks_to_four_and_back(
    three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    path, back = str(tmp_path / "three"), str(tmp_path / "four")
    expected = in_one_process("odd widths", steps=10)
    (before, _), *_ = three_ranks.run(half, "odd widths", path, TP, "tp", False)
    for after, _ in four_ranks.run(half, "odd widths", path, {"dp": 2, "tp": 2}, "auto", True):
        assert gap(before, after, expected) < 1e-8
    (before, _), *_ = four_ranks.run(half, "odd widths", back, {"tp": 4}, "tp", False)
    for after, _ in three_ranks.run(half, "odd widths", back, TP, "zero3", True):
        assert gap(before, after, expected) < 1e-8


class Flat(nn.Linear):
    """Rows and positions as one dim, of which the parts of a rank are no shard of DTensor where rows differ."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


@captured_once()
def flat_output() -> tuple[float, list[int], float]:
    """Distances of results as DTensors from one process, whole and as a rank's part, and the shape of a part."""
    torch.manual_seed(0)
    plain, x = Flat(2, 4).double(), torch.randn(7, 15, 2, dtype=torch.float64)
    made = autopar.compile(copy.deepcopy(plain), mesh={"dp": 3}, recipe="ddp", outputs="dtensor", example_inputs=(x,))
    with torch.no_grad():
        found, expected = made(x), plain(x)
    wide = autopar.compile(nn.Linear(2, 97).double(), mesh=TP, recipe="tp", outputs="dtensor", example_inputs=(x,))
    with torch.no_grad():
        columns = wide(x)
    gap = (columns.full_tensor() - x @ wide.weight.full_tensor().T - wide.bias.full_tensor()).abs().max()
    return float((found.full_tensor() - expected).abs().max()), list(columns.to_local().shape), float(gap)


def test_results_in_different_parts_are_delivered_as_dtensors(three_ranks: Ranks) -> None:
    found = three_ranks.run(flat_output)
    assert all(gap < 1e-12 and wide_gap < 1e-12 for gap, _, wide_gap in found)
    assert [shape[-1] for _, shape, _ in found] == [33, 33, 31]
