"""Every op family, with every choice it offers, against the unsplit op: forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from proof import labels_of, prove
from torch import fx

from autopar.rules import spec


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def ids(high, *shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % high


def pooled(x, reduce, axis=0, **segments):
    places = {name: torch.tensor(numbers) for name, numbers in segments.items()}
    return torch.segment_reduce(x, reduce, **places, axis=axis, unsafe=True)


SAMPLES = [
    ("aten.linear", F.linear, rand(2, 4, 6), rand(8, 6), rand(8)),
    ("aten.linear", F.linear, rand(4, 6), rand(8, 6)),
    ("aten.addmm", torch.addmm, rand(8), rand(4, 6), rand(6, 8)),
    ("aten.bmm", torch.bmm, rand(2, 4, 6), rand(2, 6, 8)),
    ("aten.baddbmm", torch.baddbmm, rand(2, 4, 8), rand(2, 4, 6), rand(2, 6, 8)),
    ("aten.matmul", torch.matmul, rand(2, 4, 4, 6), rand(4, 6, 8)),
    ("aten.matmul", torch.matmul, rand(4, 6), rand(6)),
    ("aten.einsum", lambda a, b: torch.einsum("bik,jk->bij", a, b), rand(2, 4, 6), rand(8, 6)),
    ("aten.einsum", lambda a, b: torch.einsum("...ij,...jk", a, b), rand(2, 1, 4, 6), rand(4, 6, 8)),
    ("aten.einsum", lambda a, b: torch.einsum("...e,ef->f", a, b), rand(2, 4, 6), rand(6, 4)),
    ("aten.einsum", lambda a, b: torch.einsum("iij,j->i", a, b), rand(4, 4, 6), rand(6)),
    ("aten.conv1d", F.conv1d, rand(2, 4, 8), rand(6, 4, 3), rand(6)),
    ("aten.conv2d", F.conv2d, rand(2, 4, 8, 8), rand(6, 4, 3, 3), rand(6)),
    ("aten.conv2d", lambda x, w, b: F.conv2d(x, w, b, groups=4), rand(2, 4, 8, 8), rand(8, 1, 3, 3), rand(8)),
    ("aten.conv2d", lambda x, w, b: F.conv2d(x, w, b, groups=2), rand(2, 8, 4, 4), rand(4, 4, 3, 3), rand(4)),
    ("aten.conv1d", F.conv1d, rand(4, 8), rand(6, 4, 3), rand(6)),
    ("aten.conv_transpose1d", F.conv_transpose1d, rand(2, 4, 8), rand(4, 6, 3), rand(6)),
    ("aten.conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, groups=2), rand(2, 4, 4, 4), rand(4, 3, 2, 2)),
    ("aten.embedding", lambda w, i: F.embedding(i, w), rand(8, 6), ids(8, 2, 4)),
    ("aten.embedding", lambda w, i: F.embedding(i, w, padding_idx=3), rand(8, 6), ids(8, 2, 4)),
    ("aten.embedding", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), rand(8, 6), ids(4, 2, 4)),
    ("aten.layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), rand(2, 4, 6), rand(6), rand(6)),
    ("aten.group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), rand(2, 4, 6), rand(4), rand(4)),
    (
        "aten.scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        rand(2, 4, 6, 8),
        rand(2, 4, 4, 8),
        rand(2, 4, 4, 8),
    ),
    (
        "aten.scaled_dot_product_attention",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        rand(2, 4, 6, 8),
        rand(2, 4, 4, 8),
        rand(2, 4, 4, 8),
        rand(2, 1, 6, 4),
    ),
    (
        "aten.scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        rand(2, 4, 6, 8),
        rand(2, 4, 6, 8),
        rand(2, 4, 6, 8),
    ),
    (
        "aten.scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        rand(2, 8, 6, 8),
        rand(2, 2, 6, 8),
        rand(2, 2, 6, 8),
    ),
    ("aten.add", torch.add, rand(2, 4, 6), rand(4, 1)),
    ("aten.add", lambda x, y: torch.add(x, y, alpha=2), rand(2, 4), rand(2, 4)),
    ("aten.sub", torch.sub, rand(2, 4), rand(2, 4)),
    ("aten.mul", torch.mul, rand(2, 4), rand(4)),
    ("aten.mul", lambda x: x * x, rand(2, 4)),
    ("aten.div", torch.div, rand(2, 4), rand(4)),
    ("aten.where", torch.where, rand(2, 4) > 0, rand(2, 4), rand(4)),
    ("aten.gelu", F.gelu, rand(2, 4)),
    ("aten.pow", lambda x: x**3, rand(2, 4)),
    ("aten.masked_fill", lambda x, m: x.masked_fill(m, -1.0), rand(2, 4), rand(2, 4) > 0),
    ("aten.sum", lambda x: x.sum((0, 2)), rand(2, 4, 6)),
    ("aten.mean", lambda x: x.mean(-1, keepdim=True), rand(2, 4, 6)),
    ("aten.mean", lambda x: x.mean(), rand(2, 4, 6)),
    ("aten.amax", lambda x: x.amax(1), rand(2, 4, 6)),
    ("aten.var", lambda x: x.var(-1), rand(2, 4, 6)),
    ("aten.softmax", lambda x: x.softmax(-1), rand(2, 4, 6)),
    ("aten.logsumexp", lambda x: x.logsumexp(1), rand(2, 4, 6)),
    ("aten.cumsum", lambda x: x.cumsum(1), rand(2, 4, 6)),
    ("aten.reshape", lambda x: (x * 1).reshape(8, 6) * 1, rand(2, 4, 6)),
    ("aten.reshape", lambda x: (x * 1).reshape(2, 2, 2, 6) * 1, rand(2, 4, 6)),
    ("aten.reshape", lambda x: (x * 1).reshape(3, 4) * 1, rand(2, 6)),
    ("aten.permute", lambda x: x.permute(2, 0, 1), rand(2, 4, 6)),
    ("aten.transpose", lambda x: x.transpose(-1, 0), rand(2, 4, 6)),
    ("aten.unsqueeze", lambda x: x.unsqueeze(-1), rand(2, 4)),
    ("aten.squeeze", lambda x: x.squeeze(1), rand(2, 1, 4)),
    ("aten.squeeze", lambda x: (x * 1).squeeze() * 1, rand(2, 1, 4)),
    ("aten.expand", lambda x: x.expand(6, 2, 4), rand(2, 1)),
    ("aten.slice", lambda x: x[:, 1:3], rand(2, 4, 6)),
    ("aten.slice", lambda x: x[:, ::2], rand(2, 4, 6)),
    ("aten.select", lambda x: x.select(1, 2), rand(2, 4, 6)),
    ("aten.cat", lambda x, y: torch.cat([x, y], 1), rand(2, 4), rand(2, 6)),
    ("aten.cat", lambda x, y: torch.cat([x, y]), rand(4, 2), rand(4, 2)),
    ("aten.stack", lambda x, y: torch.stack([x, y], 1), rand(2, 4), rand(2, 4)),
    ("aten.split", lambda x: x.split(2, 1), rand(2, 6)),
    ("aten.split_with_sizes", lambda x: x.split([2, 4], 1), rand(2, 6)),
    ("aten.unbind", lambda x: x.unbind(0), rand(2, 6)),
    ("aten.pad", lambda x: F.pad(x, (1, 1)), rand(2, 4)),
    ("aten.pad", lambda x: F.pad(x, (0, 0, 1, 0), value=2.0), rand(2, 4)),
    ("aten.repeat", lambda x: x.repeat(3, 1, 2), rand(2, 4)),
    ("aten.flip", lambda x: x.flip(1), rand(2, 4)),
    ("aten.index", lambda x, i: x[:, i], rand(2, 6), ids(6, 4)),
    ("aten.index", lambda x, i, j: x[i, :, j], rand(4, 2, 6), ids(4, 4, 1), ids(6, 2)),
    ("aten.index_select", lambda x, i: x.index_select(1, i), rand(2, 6), ids(6, 4)),
    ("aten.gather", lambda x, i: x.gather(1, i), rand(2, 6), ids(6, 2, 4)),
    ("aten.topk", lambda x: x.topk(2, 1), rand(2, 6)),
    ("aten.max_pool2d", lambda x: F.max_pool2d(x, 2), rand(2, 4, 4, 4)),
    ("aten.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), rand(2, 4, 4, 4)),
    ("aten.min", torch.min, rand(2, 4), rand(4)),
    ("aten.repeat_interleave", lambda x: x.repeat_interleave(3, 1), rand(2, 4, 6)),
    ("aten.view_as_complex", lambda x: torch.view_as_complex(x * 1).abs(), rand(2, 4, 2)),
    ("aten.im2col", lambda x: F.unfold(x, 2), rand(2, 4, 4, 4)),
    ("aten.col2im", lambda x: F.fold(x, (4, 4), 2), rand(2, 16, 9)),
    (
        "aten.searchsorted",
        lambda t, x: torch.searchsorted(t.detach().sort().values, x.detach()).double() * x,
        rand(2, 6),
        rand(2, 4),
    ),
    (
        "aten.lstm",
        lambda x, h, *w: torch.lstm(x, (h, h), w, False, 1, 0.0, True, False, False),
        rand(3, 4, 6),
        rand(1, 4, 2),
        rand(8, 6),
        rand(8, 2),
    ),
    (
        "aten.gru",
        lambda x, h, *w: torch.gru(x, h, w, True, 1, 0.0, True, True, True),
        rand(4, 3, 6),
        rand(2, 4, 2),
        *[rand(6, 6), rand(6, 2), rand(6), rand(6)] * 2,
    ),
    (
        "aten.lstm_cell",
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w),
        rand(4, 6),
        rand(4, 2),
        rand(4, 2) + 1,
        rand(8, 6),
        rand(8, 2),
    ),
    ("aten.gru_cell", torch.gru_cell, rand(4, 6), rand(4, 2), rand(6, 6), rand(6, 2), rand(6), rand(6)),
    ("aten.rnn_tanh_cell", torch.rnn_tanh_cell, rand(4, 6), rand(4, 2), rand(2, 6), rand(2, 2), rand(2), rand(2)),
    ("aten.embedding_bag", lambda w, i: F.embedding_bag(i, w, mode="sum"), rand(8, 6), ids(8, 2, 4)),
    (
        "aten.masked_scatter",
        lambda x, f, m: x.masked_scatter(m[..., None].expand_as(x), f),
        rand(2, 4, 6),
        rand(3, 6),
        torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool),
    ),
    ("aten.segment_reduce", lambda x: pooled(x, "mean", lengths=[3, 1, 4]), rand(8, 6)),
    ("aten.segment_reduce", lambda x: pooled(x, "max", offsets=[[0, 3, 8], [0, 4, 8]], axis=1), rand(2, 8, 6)),
    ("aten._weight_norm", lambda v, g: torch._weight_norm(v, g), rand(4, 2, 6), rand(4, 1, 1)),
    ("aten.affine_grid_generator", lambda x: F.affine_grid(x, [4, 2, 3, 5], False), rand(4, 2, 3)),
    (
        "aten.stft",
        lambda x, w: torch.stft(x, 4, 2, window=w, center=False, return_complex=True).abs(),
        rand(4, 12),
        rand(4),
    ),
    ("aten.triplet_margin_loss", F.triplet_margin_loss, rand(4, 6), rand(4, 6) * 2, rand(4, 6) + 1),
]


# Ops whose rule, or whose kind of rule, others have too, here or in a file of its own.
SELDOM = {
    "addmm",
    "bmm",
    "baddbmm",
    "conv_transpose1d",
    "sub",
    "div",
    "pow",
    "where",
    "amax",
    "var",
    "logsumexp",
    "transpose",
    "unsqueeze",
    "select",
    "unbind",
    "stack",
    "split",
    "flip",
    "repeat",
    "index_select",
    "adaptive_avg_pool2d",
    "min",
    "gru",
    "gru_cell",
    "rnn_tanh_cell",
    "col2im",
    "_weight_norm",
    "affine_grid_generator",
    "scaled_dot_product_attention",
}


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, marks=pytest.mark.slow if sample[0].removeprefix("aten.") in SELDOM else [])
        for sample in SAMPLES
    ],
    ids=lambda s: s[0].removeprefix("aten."),
)
def test_every_choice_equals_the_unsplit_op(sample):
    kind, op, *tensors = sample
    assert prove(op, *tensors, kind=kind) >= 1


def test_linear_splits_batch_rows_and_columns():
    choices = labels_of(F.linear, rand(2, 4, 6), rand(8, 6), rand(8), kind="aten.linear")
    assert choices == {"-", "b1", "b0", "k", "j"}
    # without a bias, a partial sum of the input passes too
    assert labels_of(F.linear, rand(4, 6), rand(8, 6), kind="aten.linear") == {"-", "b0", "k", "j", "+0"}


def test_softmax_keeps_its_dim_whole():
    assert labels_of(lambda x: x.softmax(1), rand(2, 4, 6), kind="aten.softmax") == {"-", "d0", "d2"}


def test_repeat_splits_what_is_not_repeated_and_rows():
    found = labels_of(lambda x: x.repeat(3, 2, 1), rand(2, 4, 6), kind="aten.repeat")
    assert found == {"-", "d0", "d2", "+0"}


def test_gradients_pass_through_complex_numbers():
    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x * 1) * 2)

    assert prove(rotated, rand(4, 6, 2), kind="aten.mul") > 1


UNCOVERED = [
    ("aten.linear", F.linear, rand(3, 4, 6), rand(6)),
    ("aten.cross_entropy_loss", F.cross_entropy, rand(6), torch.tensor(2)),
]


@pytest.mark.parametrize("sample", UNCOVERED, ids=lambda s: s[0].removeprefix("aten."))
def test_calls_that_a_rule_does_not_cover_run_whole(sample):
    kind, op, *tensors = sample
    assert labels_of(op, *tensors, kind=kind) == {"-"}


def test_an_operand_with_more_dims_than_the_result_runs_whole():
    graph = fx.Graph()
    x, like = (graph.placeholder(name) for name in ("x", "like"))
    x.meta["val"], like.meta["val"] = torch.zeros(4), torch.zeros(2, 4)
    node = graph.call_function(torch.ops.aten.type_as.default, (x, like))
    node.meta["val"] = torch.zeros(4)
    found, has_rule = spec(node)
    assert not has_rule and found.whole == frozenset(found.sizes)


def test_renorm_squares_adds_and_multiplies_each_element():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.renorm.default, (x, 2, 0, 1.0))
    x.meta["val"] = node.meta["val"] = torch.empty(4, 6, device="meta")
    found, has_rule = spec(node)
    assert has_rule and found.flops == 3 * 4 * 6


def test_a_fourier_transform_takes_5_n_log_n():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.fft_fft.default, (x,))
    x.meta["val"] = node.meta["val"] = torch.empty(4, 8, dtype=torch.complex64, device="meta")
    found, has_rule = spec(node)
    assert has_rule and found.flops == 5 * (4 * 8) * 3


def test_a_stack_of_matrices_is_transposed_in_its_last_two_dims():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mT.default, (x,))
    x.meta["val"], node.meta["val"] = torch.empty(2, 4, 6, device="meta"), torch.empty(2, 6, 4, device="meta")
    found, has_rule = spec(node)
    ((stack, row, column),) = found.operands
    assert has_rule and found.results == ((stack, column, row),)
