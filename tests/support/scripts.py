"""Training scripts that change Python values between steps, run plainly and compiled."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

Between = Callable[[nn.Module, int], object]


def trained(
    model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], between: Between
) -> list[float]:
    """The losses of five steps of SGD, before each of which a script changes something."""
    torch.manual_seed(1)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    losses = []
    for number in range(5):
        between(model, number)
        loss = step(*batch)
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses


def both(
    make: Callable[[], nn.Module], loss_fn: Any, between: Between
) -> tuple[list[float], list[float]]:
    """The losses of the compiled model and of the plain one, from the same parameters."""
    torch.manual_seed(0)
    plain = make().double()
    compiled = copy.deepcopy(plain)

    def plain_step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(plain(x), y)
        loss.backward()
        return loss

    made = autopar.compile(compiled, loss_fn=loss_fn)
    expected = trained(plain, plain_step, between)
    return trained(compiled, made.step, between), expected


def squares(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


class Scaled(nn.Module):
    """A linear layer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.beta: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) * self.beta


def line_of(kind: type, text: str) -> str:
    """`file:line` of the line in a class, or function, that has this text."""
    lines, first = inspect.getsourcelines(kind)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(kind)}:{first + number}"


def refusal(make: Callable[[], nn.Module]) -> str:
    """The message of the CaptureError that a model meets."""
    with pytest.raises(CaptureError) as caught:
        both(make, squares, lambda m, i: None)
    return str(caught.value)
