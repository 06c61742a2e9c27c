"""The cross-entropy of a linear layer's results as one op, so that its logits need not exist at the same time.

    linear_cross_entropy(x, matrix, bias, target, ...) -> cross_entropy((x @ matrix.T + bias).to(dtype), target, ...)

The op itself computes all logits, and is what the single device runs. A plan runs it in tiles: runs of rows whose
logits have at most `tile_bytes` on a rank, one after the other, each computed again in backward
(`autopar.rules.linear_loss`). As in Ivison et al. 2025, Arctic Long Sequence Training (arXiv 2506.13996), section 3.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")


def _loss(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    tile_bytes: int,
) -> Tensor:
    """The loss of rows of shape (rows, features), with a matrix of shape (classes, features)."""
    logits = F.linear(x, matrix, bias).to(dtype)
    return F.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=_REDUCTIONS[reduction],
        label_smoothing=label_smoothing,
    )


def register() -> torch.library.Library:
    """Defines the op, which exists as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    tensors = "Tensor x, Tensor matrix, Tensor? bias, Tensor target, Tensor? weight"
    numbers = "int reduction, SymInt ignore_index, float label_smoothing, ScalarType dtype, int tile_bytes"
    library.define(f"{NAME}({tensors}, {numbers}) -> Tensor")
    library.impl(NAME, _loss, "CompositeImplicitAutograd")
    return library


LIBRARY = register()
