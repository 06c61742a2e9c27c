"""Steps that are not finite change nothing on any rank, if that was asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import RootOfProduct, mean_square
from tests.support.staged import captured_once


def batches(bad: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Four batches; those that are bad hold one NaN, in a row of the last rank."""
    found = torch.randn(4, 2, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    for number in bad:
        found[number, 0, 3, 5] = float("nan")
    return [(x, y) for x, y in found]


def trained(recipe: Any, mesh: dict[str, int], bad: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
    """Trains on all batches, skipping the bad ones; or, with none bad, on the first and the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
    made = autopar.compile(
        model.double(),
        loss_fn=mean_square,
        mesh=mesh,
        recipe=recipe,
        skip_nonfinite=True,
        micro_batches=mesh.get("pp", 1),
        example_inputs=batches(())[0],
    )
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-6)
    for number, batch in enumerate(batches(bad)):
        if bad or number in (0, 3):
            made.step(*batch)
            optimizer.step()
            optimizer.zero_grad()
    state = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in made.state_dict().shards().items()}
    return made.skipped_steps, {name: x.clone() for name, x in state.items()}


@captured_once()
def both(recipe: Any, mesh: dict[str, int]) -> tuple[int, bool]:
    """How many steps were skipped, and whether the model is as if they had not been there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the loss that is NaN
        (count, found), (none, expected) = (trained(recipe, mesh, (1, 2)), trained(recipe, mesh, ()))
    assert none == 0 and found.keys() == expected.keys()
    return count, all(torch.equal(found[name], expected[name]) for name in found)


def test_one_process_skips() -> None:
    assert both("auto", {"dp": 1}) == (2, True)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("recipe", "mesh"), [("zero3", {"dp": 2}), ("1f1b", {"pp": 2})])
def test_ranks_skip_alike(two_ranks: Ranks, recipe: str, mesh: dict[str, int]) -> None:
    """Also where one rank alone has the bad row."""
    assert two_ranks.run(both, recipe, mesh) == [(2, True)] * 2


def test_gradients_alone_are_looked_at() -> None:
    skips, goes_on = (autopar.compile(RootOfProduct(), skip_nonfinite=skip) for skip in (True, False))
    for made in (skips, goes_on):
        assert made.step(torch.ones(2)) == 0
    assert skips.weight.grad is None and skips.skipped_steps == 1
    assert goes_on.weight.grad is not None and goes_on.skipped_steps == 0


def test_finite_steps_keep_their_gradients() -> None:
    made = autopar.compile(nn.Linear(8, 8).double(), loss_fn=mean_square, skip_nonfinite=True)
    made.step(*batches(())[0])
    assert made.skipped_steps == 0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in made.parameters())
