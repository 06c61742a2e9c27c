"""A loss that is NaN or infinite is warned of once, with what brought it in."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.failures.finite import FiniteLoss, about_loss


def test_the_first_step_is_named_once() -> None:
    losses = [1.0, float("inf"), float("nan"), 2.0]
    watch = FiniteLoss()
    assert [watch.found(torch.tensor(x), i) for i, x in enumerate(losses)] == [None, 1, None, None]


def test_the_cause_is_the_first_tensor_that_is_not_finite() -> None:
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    named = about_loss(7, [("tokens", torch.ones(2).long()), ("x", bad)], [("w", bad)])
    assert named.startswith("The loss of step 7 is NaN or infinite, and so are its gradients. Input x of shape [2, 2]")
    assert "2 values that are NaN or infinite, the first at [1, 0]. Correct the data" in named
    assert "Parameter w of shape [2, 2]" in about_loss(7, [("x", good)], [("w", bad)])
    assert "An earlier update caused it" in about_loss(2, [], [("w", bad)])
    assert "It was so before the first step" in about_loss(1, [], [("w", bad)])
    assert "An earlier update caused it" in about_loss(1, None, [("w", bad)])  # told after its update
    assert "so it comes from the forward" in about_loss(7, [("x", good)], [("w", good)])


class Root(nn.Module):
    """Its result is NaN for sums below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum().sqrt()


def test_a_step_warns_at_the_line_of_the_script() -> None:
    made = autopar.compile(Root())
    with torch.no_grad():
        made.up.weight.fill_(1.0)
        made.up.bias.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.step(torch.ones(4, 3))
    with pytest.warns(UserWarning, match=r"The loss of step 2 .* it comes from the forward") as caught:
        made.step(-torch.ones(4, 3))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.step(-torch.ones(4, 3))


def test_an_evaluation_is_no_step() -> None:
    made = autopar.compile(Root())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        made.up.weight.fill_(1.0)
        made.up.bias.zero_()
        assert made.step(-torch.ones(4, 3)).isnan()
    with pytest.warns(UserWarning, match="The loss of step 1 is NaN"):
        made.step(-torch.ones(4, 3))


def test_inputs_that_were_not_looked_at_are_not_called_finite() -> None:
    """On an accelerator a loss arrives during a later step, whose batch is another."""
    said = about_loss(3, None, [("weight", torch.ones(2))])
    assert "The inputs of step 3 were not checked" in said and "Inputs and parameters" not in said
    assert "Inputs and parameters are finite" in about_loss(3, [], [("weight", torch.ones(2))])
