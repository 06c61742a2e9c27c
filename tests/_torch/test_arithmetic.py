"""Operators in float64, and operators with random last bits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from autopar._torch import Float64Arithmetic, RandomLastBits, cast_in_any_arithmetic, fake_mode, widened_dtype


def test_a_cast_to_a_lower_precision_is_none() -> None:
    x = torch.full((), 1 / 3, dtype=torch.float64, requires_grad=True)
    with Float64Arithmetic():
        y = F.softmax(x.to(torch.bfloat16).float() * torch.ones(2, dtype=torch.float16), -1)
        (y[0] * x.half()).backward()
    assert y.dtype == torch.float64
    assert x.grad is not None and x.grad.item() == 0.5


def test_an_operator_of_mixed_precision_runs_in_float64() -> None:
    x, weight = torch.ones(2, 3, dtype=torch.float64), torch.full((4, 3), 0.1)
    with Float64Arithmetic():
        y = F.linear(x, weight)
    assert y.dtype == torch.float64 and y[0, 0].item() == 3 * weight[0, 0].double().item()


def test_grouped_products_are_those_of_the_kernel() -> None:
    """Forward and both gradients: rows with matrices, rows with rows, matrices with rows."""
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    given = torch.randn(8, 16), torch.randn(3, 16, 32)
    results = []
    for arithmetic, dtype in (nullcontext(), torch.float32), (Float64Arithmetic(), torch.float64):
        x, weights = (t.to(dtype).requires_grad_() for t in given)
        with arithmetic:
            y = F.grouped_mm(x, weights, offs=ends)
            results.append([y, *torch.autograd.grad(y.sin().sum(), (x, weights))])
    assert results[1][0].dtype == torch.float64
    for kernel, definition in zip(*results, strict=True):
        torch.testing.assert_close(definition.float(), kernel)


@pytest.mark.parametrize(
    "shapes",
    [((8, 16), (3, 16, 32)), ((16, 8), (8, 32)), ((3, 16, 32), (32, 8))],
    ids=["rows with matrices", "rows with rows", "matrices with rows"],
)
def test_grouped_products_of_tensors_without_values_have_the_shape_of_the_kernel(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    x, y = (torch.ones(shape, dtype=torch.float64) for shape in shapes)
    with Float64Arithmetic():
        expected = F.grouped_mm(x, y, offs=ends)
    with fake_mode() as mode, Float64Arithmetic():
        found = F.grouped_mm(*(mode.from_tensor(t) for t in (x, y)), offs=mode.from_tensor(ends))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_integers_and_complex_numbers_widen_to_their_kind() -> None:
    assert widened_dtype(torch.int64) is torch.int64
    assert widened_dtype(torch.complex64) is torch.complex128


def test_a_cast_keeps_its_format_in_float64_arithmetic() -> None:
    x = torch.rand(3).double()
    with Float64Arithmetic():
        assert x.to(torch.float32).dtype is torch.float64
        assert cast_in_any_arithmetic(x, torch.float32).dtype is torch.float32


def test_codes_of_eight_bits_stay() -> None:
    x = torch.rand(3)
    with RandomLastBits(0):
        assert x.to(torch.float8_e4m3fn).dtype is torch.float8_e4m3fn


def test_last_bits_move_by_at_most_one_unit_and_repeat_by_seed() -> None:
    x = torch.rand(1000) + 1  # one unit in the last place is eps for numbers from 1 to 2
    runs = []
    for seed in (0, 0, 1):
        with RandomLastBits(seed):
            runs.append(x.clone())
    eps = torch.finfo(torch.float32).eps
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    moved = (runs[0] - x).abs()
    assert moved.max() <= 2 * eps and (moved > 0).float().mean() > 0.5


def test_moved_results_keep_their_strides() -> None:
    """Of one position, strides tell channels_last from contiguous; group norm has a kernel for each."""
    x = torch.rand(4, 6, 1, 1).as_strided((4, 6, 1, 1), (6, 1, 6, 6))
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with RandomLastBits(0):
        found = [x.clone(), image.clone()]
    assert [each.stride() for each in found] == [(6, 1, 6, 6), image.stride()]
    assert not torch.equal(found[1], image)


def test_integers_stay_and_nothing_becomes_infinite() -> None:
    counts = torch.tensor([0.0, 1.0, 17.0, -1.0])
    mixed = torch.tensor([0.5, float("inf"), torch.finfo(torch.float32).max])
    for seed in range(8):
        with RandomLastBits(seed):
            assert torch.equal(counts + 0, counts)
            found = mixed + 0
        assert found[1] == mixed[1] and found[2].isfinite()
