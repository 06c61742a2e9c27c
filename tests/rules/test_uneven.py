"""Rules along a batch that the ranks do not divide: parts of torch.chunk's sizes, of which some may have no rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from proof import prove

from autopar.ir import Mesh


def rand(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def classes(*shape: int) -> torch.Tensor:
    found = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3
    found.view(-1)[:2] = -100
    return found


def batch_norm(x, weight, bias):
    return F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), weight, bias, training=True)


CASES = {
    "mean": (lambda x: x.mean(), (rand(7, 3),), "aten.mean", "d0"),
    "mean of rows": (lambda x: x.mean((0, 2), keepdim=True), (rand(7, 3, 2),), "aten.mean", "d0"),
    "sum": (lambda x: x.sum(0), (rand(7, 3),), "aten.sum", "d0"),
    "batch norm": (batch_norm, (rand(7, 3, 4), rand(3), rand(3)), "aten._native_batch_norm_legit_functional", "b0"),
    "cross-entropy": (F.cross_entropy, (rand(7, 3), classes(7)), "aten.cross_entropy_loss", "n0"),
    "weighted": (lambda x, y, w: F.cross_entropy(x, y, w.abs()), (rand(7, 3), classes(7), rand(3)), "", "n0"),
    "linear": (F.linear, (rand(7, 3), rand(4, 3), rand(4)), "aten.linear", "b0"),
    "convolution": (F.conv1d, (rand(7, 3, 5), rand(4, 3, 3)), "aten.convolution", "n"),
    "attention": (F.scaled_dot_product_attention, (rand(7, 2, 4, 3),) * 3, "aten.scaled_dot_product_attention", "b0"),
    "view": (lambda x: x.reshape(7 * 4, 3), (rand(7, 4, 3),), "aten.reshape", "d0"),
}


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_right_on_parts_of_different_sizes(case: str, ranks: int) -> None:
    op, tensors, kind, label = CASES[case]
    assert prove(op, *tensors, kind=kind or "aten.cross_entropy_loss", mesh=Mesh.of({"a": ranks}), batch=label) == 1
