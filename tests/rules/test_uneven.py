"""Rules on parts of torch.chunk's sizes: of a batch, of which some ranks may have no rows, and of all other dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from proof import prove

from autopar.ir import Mesh


def rand(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def batch_norm(x, weight, bias):
    return F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), weight, bias, training=True)


def classes(*shape: int) -> torch.Tensor:
    found = torch.arange(torch.Size(shape).numel()).reshape(shape) % 3
    found.view(-1)[:2] = -100
    return found


def weighted(x, target, weight):
    return F.cross_entropy(x, target, weight.detach().exp())


CASES = {
    "mean": (lambda x: x.mean(), (rand(7, 3),), "aten.mean"),
    "mean of rows": (lambda x: x.mean((0, 2), keepdim=True), (rand(7, 3, 2),), "aten.mean"),
    "sum": (lambda x: x.sum(0), (rand(7, 3),), "aten.sum"),
    "batch norm": (batch_norm, (rand(7, 3, 4), rand(3), rand(3)), "aten._native_batch_norm_legit_functional"),
    # 105 rows in place of 7 of 15: the ranks divide the dim, but not the batch in it.
    "mean of a dim with the batch in it": (lambda x: x.flatten(0, 1).mean(0), (rand(7, 15, 2),), "aten.mean"),
    "batch norm of a dim with the batch in it": (
        lambda x, *own: batch_norm(x.flatten(0, 1), *own),
        (rand(7, 15, 3), rand(3), rand(3)),
        "aten._native_batch_norm_legit_functional",
    ),
    "cross-entropy of a dim with the batch in it": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
        (rand(7, 15, 3), classes(7, 15)),
        "aten.cross_entropy_loss",
    ),
    "cross-entropy": (F.cross_entropy, (rand(7, 3), classes(7)), "aten.cross_entropy_loss"),
    "weighted": (weighted, (rand(7, 3), classes(7), rand(3)), "aten.cross_entropy_loss"),
    "linear": (F.linear, (rand(7, 3), rand(4, 3), rand(4)), "aten.linear"),
    "convolution": (F.conv1d, (rand(7, 3, 5), rand(4, 3, 3)), "aten.conv1d"),
    "attention": (F.scaled_dot_product_attention, (rand(7, 2, 4, 3),) * 3, "aten.scaled_dot_product_attention"),
    "cross": (torch.cross, (rand(7, 3), rand(7, 3) + 1), "aten.cross"),
    "powers": (torch.linalg.vander, (rand(7),), "aten.linalg_vander"),
    "view": (lambda x: x.reshape(7 * 4, 3), (rand(7, 4, 3),), "aten.reshape"),
}


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def smoothed(x, target, weight):
    return F.cross_entropy(x, target, weight.detach().exp(), label_smoothing=0.3)


TOKENS = (3, 7)
WIDTHS = {
    "table": (lambda w, i: F.embedding(i, w), (rand(97, 7), torch.arange(21).reshape(TOKENS) * 4), "aten.embedding"),
    "table with padding": (
        lambda w, i: F.embedding(i, w, padding_idx=2),
        (rand(7, 3), torch.arange(21).reshape(TOKENS) % 7),
        "aten.embedding",
    ),
    "classes": (F.cross_entropy, (rand(9, 11), torch.arange(9)), "aten.cross_entropy_loss"),
    "weighted classes": (smoothed, (rand(9, 11), torch.arange(9), rand(11)), "aten.cross_entropy_loss"),
    "probabilities": (F.cross_entropy, (rand(9, 11), rand(9, 11).softmax(1).detach()), "aten.cross_entropy_loss"),
    "linear": (F.linear, (rand(2, 7, 11), rand(9, 11), rand(9)), "aten.linear"),
    "groups": (lambda x, w: F.conv1d(x, w, groups=9), (rand(2, 18, 5), rand(9, 2, 3)), "aten.conv1d"),
    "transposed": (F.conv_transpose1d, (rand(2, 9, 5), rand(9, 11, 3), rand(11)), "aten.conv_transpose1d"),
    "group norm": (lambda x: F.group_norm(x, 9), (rand(2, 18, 5),), "aten.group_norm"),
    "heads and queries": (
        grouped,
        (rand(1, 18, 11, 3), *(rand(1, 9, 11, 3),) * 2),
        "aten.scaled_dot_product_attention",
    ),
    "thirds": (lambda x: x.chunk(3, 1), (rand(2, 27),), "aten.split"),
    "copies": (lambda x: x.repeat(3, 1), (rand(9, 2),), "aten.repeat"),
    "mean of columns": (lambda x: x.mean(1), (rand(2, 9),), "aten.mean"),
    "cross": (torch.cross, (rand(9, 3),) * 2, "aten.cross"),
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("case", WIDTHS)
def test_a_rule_is_right_on_different_parts_of_any_dim(case: str, ranks: int) -> None:
    op, tensors, kind = WIDTHS[case]
    assert prove(op, *tensors, kind=kind, mesh=Mesh.of({"a": ranks})) >= 1


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_right_on_parts_of_different_sizes(case: str, ranks: int) -> None:
    op, tensors, kind = CASES[case]
    assert prove(op, *tensors, kind=kind, mesh=Mesh.of({"a": ranks}), rows=7) >= 1
