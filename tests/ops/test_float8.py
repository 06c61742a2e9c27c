"""Products of operands that are rounded to float8 in tiles, against hand-made numbers and torch's own product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar import _torch
from autopar.ops.float8 import TILE, product, quantized

LARGEST = 448.0
CODES = sorted(
    sign * (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
    for sign in (-1, 1)
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # NaN
)  # every number of e4m3: four bits of exponent, three of mantissa, and subnormal ones


def nearest(x: Tensor) -> Tensor:
    """The number of e4m3 that is nearest; no test asks for a number half-way between two."""
    codes = torch.tensor(CODES, dtype=torch.float64)
    return codes[(x.double().unsqueeze(-1) - codes).abs().argmin(-1)]


def reference(matrix: Tensor) -> Tensor:
    """Each tile divided by its scale, rounded, and multiplied by it."""
    tiles = matrix.double().unflatten(1, (-1, TILE))
    scales = tiles.abs().amax(2, keepdim=True) / LARGEST
    return (nearest(tiles / scales) * scales).flatten(1)


def drawn(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64) * torch.rand(shape[0], 1).double().exp()


def test_every_tile_has_a_scale_of_its_own():
    x = torch.zeros(1, 2 * TILE)
    x[0, :2] = torch.tensor([448.0, 17.0])  # 16 and 18 are numbers of e4m3, and 16 is the even one
    x[0, TILE : TILE + 2] = torch.tensor([4.48, 0.17])
    tiles = quantized(x)
    assert tiles.values()[0, :2].tolist() == [448, 16]
    assert tiles.values()[0, TILE : TILE + 2].tolist() == pytest.approx([4.48, 0.17], rel=0.07)
    assert tiles.scales[0].tolist() == pytest.approx([1, 0.01])


def test_rounding_is_to_the_nearest_number_of_the_format():
    x = drawn(16, 2 * TILE)
    assert torch.allclose(quantized(x).values(), reference(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-42, float("inf"), float("nan")])
def test_tiles_without_a_usable_largest_number(value):
    tiles = quantized(torch.full((1, TILE), value)).values()
    assert torch.isfinite(tiles).all() if value < 1 else tiles.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_torchs_kernel_summed_over_tiles(dtype):
    """torch._scaled_mm takes one scale for a whole matrix on a processor: a tile and a row at a time."""
    left, right = quantized(drawn(4, 2 * TILE).float()), quantized(drawn(16, 2 * TILE).float())
    expected = torch.zeros(4, 16)
    for t in range(2):
        columns = slice(t * TILE, (t + 1) * TILE)
        one = torch.ones(())
        summed = torch._scaled_mm(
            left.codes[:, columns].contiguous(),
            right.codes[:, columns].contiguous().t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
        )
        expected += summed * left.scales[:, t, None] * right.scales[None, :, t]
    bound = 1e-5 if dtype is torch.float32 else 2**-8
    assert torch.allclose(product(left, right, dtype).float(), expected, rtol=bound, atol=bound)


def test_gradients_are_products_of_rounded_operands_but_for_the_weights():
    x, weight = drawn(6, 2 * TILE), drawn(TILE, 2 * TILE)
    x, weight = x.view(2, 3, -1).requires_grad_(), weight.requires_grad_()
    result = _torch.autopar_op("float8_linear")(x, weight)
    gradient = drawn(6, TILE).view(2, 3, TILE)
    found = torch.autograd.grad(result, (x, weight), gradient)
    rows, flat = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    columns = weight.detach().t()
    near = {"rtol": 1e-12, "atol": 1e-12}
    assert torch.allclose(result.flatten(0, 1), reference(rows) @ reference(weight.detach()).t(), **near)
    assert torch.allclose(found[0].flatten(0, 1), reference(flat) @ reference(columns).t(), **near)
    assert torch.allclose(found[1], flat.t() @ rows, **near)


@pytest.mark.parametrize("frozen", [0, 1])
def test_an_operand_without_a_gradient_gets_none(frozen):
    operands = [drawn(2, TILE), drawn(TILE, TILE)]
    operands[1 - frozen].requires_grad_()
    _torch.autopar_op("float8_linear")(*operands).sum().backward()
    assert [x.grad is None for x in operands] == [i == frozen for i in range(2)]
