"""Training scripts that change Python values between steps, run plainly and at both doors of autopar."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import autopar

Between = Callable[[Any, int], object]
Step = Callable[[Tensor, Tensor], Tensor]


def squares(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


def nothing(*_: Any) -> None:
    """Changes nothing, and reads nothing."""


@dataclass(frozen=True)
class Script:
    """Five steps of SGD of a small model.

    Attributes:
        make: builds the model.
        loss_fn: the loss of the model's output and the target.
        between: changes the model or other values, before the step of the given number.
        wrote: reads the values that forward wrote, at the end; they are compared as well.
        line: text of the line that `autopar.compile` names as it refuses the script; "" where it trains.
        cause: text of the refusal.
    """

    make: Callable[[], nn.Module]
    loss_fn: Any = squares
    between: Between = nothing
    wrote: Callable[[Any], Any] = nothing
    line: str = ""
    cause: str = ""


def plainly(model: nn.Module, loss_fn: Any, options: Mapping[str, Any]) -> Step:
    """The step without autopar."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        return loss

    return step


def by_compile(model: nn.Module, loss_fn: Any, options: Mapping[str, Any]) -> Step:
    """The step of `autopar.compile`."""
    return autopar.compile(model, loss_fn=loss_fn, **options).step


def by_backend(model: nn.Module, loss_fn: Any, options: Mapping[str, Any]) -> Step:
    """The step with the model compiled by the backend, and the loss left alone."""
    return plainly(_backed(model, options), loss_fn, options)


def by_backend_with_loss(model: nn.Module, loss_fn: Any, options: Mapping[str, Any]) -> Step:
    """The step with model and loss compiled as one function by the backend."""
    loss_of = _backed(lambda x, y: loss_fn(model(x), y), options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        loss.backward()
        return loss

    return step


def _backed(function: Any, options: Mapping[str, Any]) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="autopar", options=dict(options))


DOORS = {"compile": by_compile, "backend": by_backend, "backend with the loss": by_backend_with_loss}


def trained(model: nn.Module, step: Step, between: Between) -> list[float]:
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


def outcome(
    script: Script, door: Callable[..., Step] = plainly, options: Mapping[str, Any] | None = None
) -> tuple[list[float], Any]:
    """The losses of a script at a door, from one seed, and the values that its forward wrote."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = script.make().double()
    losses = trained(model, door(model, script.loss_fn, options or {}), script.between)
    return losses, script.wrote(model)


class Scaled(nn.Module):
    """A linear layer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.beta: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) * self.beta


def line_of(kind: Any, text: str) -> str:
    """`file:line` of the line in a class, or function, that has this text."""
    lines, first = inspect.getsourcelines(kind)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(kind)}:{first + number}"
