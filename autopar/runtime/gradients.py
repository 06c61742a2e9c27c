"""Gradients of one step, kept apart from those that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")


def gradients_of(
    run: Callable[[], Result], parameters: Sequence[nn.Parameter]
) -> tuple[Result, list[Tensor | None]]:
    """Runs a step; `.grad` is afterwards as it was, and the gradients of the step are returned.

    Args:
        run: the step.
        parameters: the trained parameters that this rank holds.

    Returns:
        The result of `run`, and the gradient of each parameter; None of one that got none.
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
