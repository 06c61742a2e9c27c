"""Tensor parallelism in one to three dims: bytes counted and saved against formulas, and results of one device."""

from __future__ import annotations

import math

import pytest
import torch

import autopar
from benchmarks.accuracy.tensor_dims import (
    BATCH,
    CASES,
    ITEMSIZE,
    ROWS,
    SEQ,
    Case,
    Layers,
    mean_square,
    of_a_layer,
    simulated,
)

WIDTH = 32
SMALL = [case for case in CASES if math.prod(case.sizes) <= 8]  # `python benchmarks/accuracy/tensor_dims.py` has all
# x, its norm with a number for each row, up's result and gelu's: what one device saves of a layer
WHOLE = ITEMSIZE * (ROWS * (WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH) + ROWS)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_layer_sends_what_the_paper_says_and_saves_its_share(case: Case) -> None:
    ranks = math.prod(case.sizes)
    with simulated(ranks):
        received, saved = of_a_layer(case, WIDTH)
    assert received == case.formula(WIDTH)
    if case.name != "1d":  # of q x q ranks each saves a q-squared-th part, the gathered operands included
        assert saved == WHOLE / ranks


def test_the_formulas_by_hand() -> None:
    """Widths of 32 and 128 and 256 rows of float32: blocks of A of 128 x 16 and 128 x 64, of B of 16 x 64 numbers."""
    narrow, wide, weight, norm = 128 * 16, 128 * 64, 16 * 64, 128 * 16 // 2
    assert Case("2d", (2, 2)).formula(32) == 4 * (3 * (narrow + wide) + 2 * 3 * weight + 2 * norm)
    assert Case("1d", (4,)).formula(32) == 4 * 2 * 1.5 * 256 * 32


@pytest.mark.parametrize("case", [case for case in SMALL if case.name != "1d"], ids=str)
def test_the_result_is_that_of_one_device(case: Case) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=torch.float64)
    report = autopar.verify(Layers(WIDTH, 2).double(), x, mesh=case.mesh, recipe=case.recipe, loss_fn=mean_square)
    assert report.passed, str(report)
