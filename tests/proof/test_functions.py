"""Models with a backward of their own, split and cut by any legal plan, have the loss and gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.support.functions import NAMES, made

MESHES = ({"a": 2}, {"a": 2, "b": 2})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
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


class Masks(torch.autograd.Function):
    """A dropout of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Masks.apply(self.linear(x)).square().mean()


def test_draws_of_a_function_are_seen() -> None:
    with pytest.raises(
        AutoparError, match=r"draws random numbers \(.*Masks, at .*test_functions.py:"
    ):
        autopar.verify(Masked(), (torch.ones(4, 8),), mesh={"a": 2}, plan="random", seed=0)
