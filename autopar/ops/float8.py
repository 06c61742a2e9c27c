"""A product in float8 as an op: operands are rounded tile by tile just before they are multiplied.

    torch.ops.autopar.float8_linear(x, weight) -> x @ weight.T

A tile is a row of 128 numbers along the dim that is summed over, with one scale that brings its largest number to the
largest of float8 e4m3, 448 (DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2, tiles of 1x128). The scale is of the values
that are there, so that nothing is kept from step to step. Products of a tile are summed as numbers of e4m3, multiplied
by both scales, and summed over tiles in float32 (float64 where the operands have it).

Rounded are both operands of the product in forward, and of the product in backward that makes the gradient of `x`: the
gradient of the result and the weight, in tiles along the columns of the result. The gradient of the weight is the plain
product, because it is summed over tokens (as in torchao's recipe `rowwise_with_gw_hp`).

A tile is never cut by a plan, so that all ranks together round as one device does (`autopar.rules.contract`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar import _torch
from autopar.ops.attention_block import wide

TILE = 128
_NAME = "float8_linear"
_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max


class Tiles(NamedTuple):
    """A matrix in float8.

    Attributes:
        codes: the numbers divided by their scales, of shape (rows, columns), in float8 e4m3.
        scales: one scale a tile, of shape (rows, columns / 128), in float32 or float64.
    """

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """The numbers that the tiles stand for, in the format of the scales."""
        codes = self.codes.to(self.scales.dtype).unflatten(1, (-1, TILE))
        return (codes * self.scales.unsqueeze(2)).flatten(1)


def quantized(matrix: Tensor) -> Tiles:
    """A matrix of shape (rows, a multiple of 128 columns), rounded to float8 in tiles of 128 columns.

    A tile with a NaN or an infinite number is NaN.

    >>> x = torch.tensor([[448.0, 17.0] + 126 * [0.0]])
    >>> quantized(x).values()[0, :2]
    tensor([448.,  16.])
    """
    tiles = matrix.to(wide(matrix.dtype)).unflatten(1, (-1, TILE))
    smallest = torch.finfo(tiles.dtype).tiny  # where all numbers are zero, or nearly
    scales = (tiles.abs().amax(2) / _LARGEST).clamp_min(smallest)
    codes = (tiles / scales.unsqueeze(2)).clamp(-_LARGEST, _LARGEST)
    return Tiles(codes.flatten(1).to(_FORMAT), scales)


def product(left: Tiles, right: Tiles, dtype: torch.dtype) -> Tensor:
    """left @ right.T, of shape (rows of left, rows of right), summed in float32 or float64 and given as `dtype`."""
    if _torch.multiplies_tiles(left.codes.device, dtype):
        return _torch.product_of_tiles((left.codes, left.scales), (right.codes, right.scales), dtype)
    return (left.values() @ right.values().t()).to(dtype)


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    found = product(quantized(rows), quantized(weight), x.dtype)
    return found.view(*x.shape[:-1], weight.shape[0])


def _forward_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class _Rounded(torch.autograd.Function):
    """The op with the gradients of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with _torch.below_autograd():
            found: Tensor = _torch.autopar_op(_NAME)(x, weight)
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = None if weight is None else _torch.autopar_op(_NAME)(gradient, weight.t())
        of_weight = None if x is None else gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return of_x, of_weight


def register() -> torch.library.Library:
    """Defines the op, which exists as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    library.define(f"{_NAME}(Tensor x, Tensor weight) -> Tensor")
    library.impl(_NAME, _forward, "CompositeExplicitAutograd")
    library.impl(_NAME, lambda *args: _Rounded.apply(*args), "Autograd")
    library.impl(_NAME, _forward_shape, "Meta")
    return library


LIBRARY = register()
