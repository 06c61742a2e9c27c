"""A behaviour that scripts may expect of a module: a small function of the module and a batch.

It gets a module, plain or made ready for several ranks, with inputs and targets, and returns what can be compared:
numbers, words, lists of them. Nothing in it knows of autopar. Each is asked of a fresh module, and of one that has been
trained for a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.loop import whole

Behaviour = Callable[[Any, Tensor, Tensor], Any]
BEHAVIOURS: dict[str, Behaviour] = {}


class Model(nn.Module):
    """Linear layers, a norm with statistics, a tied weight, a frozen weight, a buffer, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.again.weight = self.second.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 1.5))
        self.kind = "small"

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        h = self.second(self.norm(torch.tanh(self.first(x))))
        out: Tensor = self.head(torch.tanh(self.again(h))) * self.scale
        return out if shift is None else out + shift

    def described(self) -> str:
        return f"a {self.kind} model"


def behaviour(function: Behaviour) -> Behaviour:
    """Lists a behaviour under its name."""
    BEHAVIOURS[function.__name__.replace("_", " ").strip()] = function
    return function


def number(x: Any) -> float:
    """A number that all elements of a tensor change."""
    values = whole(x).double()
    return float((values.cos() + 0.1 * values).sum())


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def named(model: Any) -> dict[str, float]:
    """The parameters by name."""
    return {name: number(p) for name, p in model.named_parameters()}


def grads(model: Any) -> dict[str, Any]:
    """The gradients by name."""
    return {name: None if p.grad is None else number(p.grad) for name, p in model.named_parameters()}


def trained(model: Any, optimizer: Any, x: Tensor, y: Tensor, steps: int = 2) -> Any:
    """Losses and parameters of a few steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named(model)


def refused(run: Callable[[], Any], *words: str) -> Any:
    """Whether an error has each of the words; "no error" where there is none."""
    try:
        run()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return [word in str(error) for word in words]
    return "no error"
