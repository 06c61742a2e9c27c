"""Gradients of one step, without adding them to those that are already in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")


def gradients_of(run: Callable[[], Result], parameters: Sequence[nn.Parameter]) -> tuple[Result, list[Tensor | None]]:
    """Runs a step and returns its gradients; `.grad` of every parameter is left as it was.

    Args:
        run: function that runs the step.
        parameters: the trained parameters that this rank holds.

    Returns:
        The result of `run`, and the gradient of each parameter, None for a parameter without one.
    """
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        result = run()
        return result, [p.grad for p in parameters]
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
