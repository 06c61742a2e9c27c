"""Operators in float64, and operators with random last bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autopar._torch import Float64Arithmetic, RandomLastBits, widened_dtype


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


def test_integers_and_complex_numbers_widen_to_their_kind() -> None:
    assert widened_dtype(torch.int64) is torch.int64
    assert widened_dtype(torch.complex64) is torch.complex128


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


def test_masks_and_infinities_stay() -> None:
    x = torch.tensor([0.0, 1.0, -1.0, float("inf"), torch.finfo(torch.float32).max])
    for seed in range(8):
        with RandomLastBits(seed):
            found = x + 0
        assert torch.equal(found[:4], x[:4]) and found[4].isfinite()
