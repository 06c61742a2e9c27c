"""A micro-batch of a pipeline that has no share in the loss, because none of its elements counts.

Its loss is 0 / 0, and gradients that come from it are nan even where they are multiplied by 0. Through stages it runs
nevertheless, because every stage waits for what the next one sends back. So its gradients become zeros where they leave
the graph of a stage, on the way to parameters and to received tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Muted(torch.autograd.Function):
    """The tensor itself in forward; a gradient of zeros in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.zeros_like(gradient)


class _Nothing(torch.autograd.Function):
    """0 in forward; a gradient of zeros in backward, for which nothing is saved: the schedule detaches losses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def muted(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, whose gradients are zeros whatever the gradients of their results."""
    return [_Muted.apply(x) if x.requires_grad else x for x in tensors]


def share_of(loss: Tensor, share: float) -> Tensor:
    """The part of the batch's loss that a micro-batch gives; 0 for a loss of 0 / 0 without a share."""
    found: Tensor = loss * share if share else _Nothing.apply(loss)
    return found
