"""Models with a backward of their own, split and cut by any legal plan, have the loss and gradients of one device."""

from __future__ import annotations

import pytest

import autopar
from tests.support.functions import NAMES, made
from tests.support.tables import often

MESHES = ({"a": 2}, {"a": 2, "b": 2})


@pytest.mark.parametrize("mesh", often(MESHES, MESHES[1:]), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_random_plans(name: str, mesh: dict[str, int]) -> None:
    model, batch = made(name)
    for seed in range(2):
        report = autopar.verify(model, batch, mesh=mesh, plan="random", seed=seed)
        assert report.passed, report


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_stages(schedule: str) -> None:
    """The schedule zb cuts the backward into a half for inputs and a half for parameters."""
    model, batch = made("stack")
    report = autopar.verify(model, batch, mesh={"pp": 2}, micro_batches=2, recipe=schedule)
    assert report.passed, report
