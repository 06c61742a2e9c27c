"""What the rules say an op keeps for backward, against what autograd keeps of it alone.

Each op stands between parameters and a sum, which keeps nothing. Every set of operands that can take a
gradient is tried; the others are frozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.planning.planning import prepare_step
from benchmarks.accuracy.saved_activations import priced_bytes, program_kept_bytes
from tests.support.tables import often

# Single numbers that are not tensors of the price, in bytes: the sum of the targets' weights that a loss keeps, with
# smoothed labels two more, and an element that torch allocates behind the bags of all indices. Everything else
# agrees to the byte, so that no kept tensor can be left out unnoticed.
UNPRICED_BYTES = {
    "cross_entropy": 8,
    "cross_entropy of images": 8,
    "smoothed cross_entropy": 24,
    "weighted nll_loss": 8,
    "nll_loss": 8,
    "embedding_bag": 8,
}


class Between(nn.Module):
    """sum(op(x + 0, ...)): floating tensors are parameters, others buffers, and `x + 0` is not a leaf."""

    def __init__(self, op: Callable[..., object], tensors: tuple[Tensor, ...], frozen: frozenset[int]) -> None:
        super().__init__()
        self.op, self.count = op, len(tensors)
        for i, x in enumerate(tensors):
            if x.is_floating_point():
                self.register_parameter(f"x{i}", nn.Parameter(x.clone(), i not in frozen))
            else:
                self.register_buffer(f"x{i}", x.clone())

    def forward(self) -> Tensor:
        tensors = (getattr(self, f"x{i}") for i in range(self.count))
        result = self.op(*(x + 0 if x.is_floating_point() else x for x in tensors))
        parts = result if isinstance(result, (tuple, list)) else [result]
        return torch.stack([x.double().sum() for x in parts if x.is_floating_point()]).sum()


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape)


def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **how: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, *rest, **how)  # type: ignore[arg-type]


TORCH = """
    abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor
    frac lgamma log log10 log1p log2 logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn
    sigmoid sign sin sinc sinh sqrt square tan tanh trunc
"""
FUNCTIONAL = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu
    softplus softshrink softsign tanhshrink
"""

ONE: dict[str, Callable[[Tensor], object]] = {
    **{name: getattr(torch, name) for name in TORCH.split()},
    **{name: getattr(F, name) for name in FUNCTIONAL.split()},
    "add scalar": lambda a: a + 2,
    "mul scalar": lambda a: a * 2,
    "div scalar": lambda a: a / 2,
    "scalar div": lambda a: 2 / a,
    "remainder scalar": lambda a: a % 2,
    "pow": lambda a: a**3,
    "scalar pow": lambda a: 2**a,
    "clamp": lambda a: a.clamp(0, 1),
    "clamp_min": lambda a: a.clamp_min(0),
    "masked_fill": lambda a: a.masked_fill(a.detach() > 0, 0.0),
    "to float32": lambda a: a.float(),
    "sum": lambda a: a.sum(0),
    "mean": lambda a: a.mean(1),
    "amax": lambda a: a.amax(1),
    "max": lambda a: a.max(1),
    "max of all": lambda a: a.max(),
    "min": lambda a: a.min(0),
    "var": lambda a: a.var(1),
    "std": lambda a: a.std(1),
    "var_mean": lambda a: torch.var_mean(a, 1),
    "logsumexp": lambda a: a.logsumexp(1),
    "prod": lambda a: a.prod(1),
    "norm": lambda a: torch.linalg.vector_norm(a, dim=1),
    "cumsum": lambda a: a.cumsum(1),
    "cumprod": lambda a: a.cumprod(1),
    "softmax": lambda a: a.softmax(1),
    "softmax in float32": lambda a: a.softmax(1, dtype=torch.float32),
    "log_softmax": lambda a: a.log_softmax(1),
    "topk": lambda a: a.topk(2, 1),
    "sort": lambda a: a.sort(1),
    "pad": lambda a: F.pad(a, (1, 1)),
    "reflect": lambda a: F.pad(a[None], (1, 1), mode="reflect"),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 0),
    "repeat": lambda a: a.repeat(2, 1),
    "tril": lambda a: a.tril(),
    "split": lambda a: [part.sin() for part in a.split(4, 1)],
    "chunk unequal": lambda a: [part.sin() for part in a.split([2, 6], 1)],
    "unbind": lambda a: [part.sin() for part in a.unbind(0)],
    "select": lambda a: a.select(1, 0).sin()[:, None] * a[:, 1:3].sin(),
    "expand": lambda a: a[:, None].expand(-1, 5, -1).sin() * a[:, None].cos(),
    "expanded and saved": lambda a: a.sin()[:, None].expand(-1, 5, -1) * a.cos()[:, None],
    "reshape that copies": lambda a: a.sin().t().reshape(4, -1).sin(),
    "transpose": lambda a: a.sin().t().sin(),
    "transposed linear": lambda a: F.linear(a.sin().view(2, 3, 8).mT, a.cos().view(8, 6)[:, :3]),
    "not on the way to the loss": lambda a: a.sin() + a.exp().cos().argmax(),
    "masked by zeros": lambda a: a * torch.zeros_like(a) + torch.ones_like(a),
    "detached": lambda a: a * a.detach(),
    "type_as itself": lambda a: a.sin().type_as(a).sin(),
    "avg_pool2d": lambda a: F.avg_pool2d(a[None], 2),
    "max_pool2d": lambda a: F.max_pool2d(a[None], 2),
    "max_pool1d": lambda a: F.max_pool1d(a, 2),
    "global pool": lambda a: F.adaptive_avg_pool2d(a[None], 1),
    "adaptive pool": lambda a: F.adaptive_avg_pool2d(a[None], (3, 4)),
    "cummax": lambda a: a.cummax(1)[0],
    "logcumsumexp": lambda a: a.logcumsumexp(1),
    "aminmax": lambda a: a.aminmax(dim=1),
    "trapezoid": lambda a: torch.trapezoid(a),
    "repeat_interleave": lambda a: a.repeat_interleave(2, 1).sin(),
    "max_pool3d": lambda a: F.max_pool3d(a[None, None].expand(2, 2, -1, -1), 2),
    "interpolate signals": lambda a: F.interpolate(a[None], scale_factor=2, mode="linear"),
    "interpolate": lambda a: F.interpolate(a[None, None], scale_factor=2),
}

MANY: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "add": (torch.add, (x(4, 6), x(6))),
    "sub": (torch.sub, (x(4, 6), x(6))),
    "mul": (torch.mul, (x(4, 6), x(6))),
    "div": (torch.div, (x(4, 6), positive(6))),
    "pow": (torch.pow, (positive(4, 6), x(6))),
    "maximum": (torch.maximum, (x(4, 6), x(6))),
    "atan2": (torch.atan2, (x(4, 6), x(4, 6))),
    "fmod": (torch.fmod, (x(4, 6), positive(4, 6))),
    "remainder": (torch.remainder, (x(4, 6), positive(4, 6))),
    "hypot": (torch.hypot, (x(4, 6), x(4, 6))),
    "lerp": (torch.lerp, (x(4, 6), x(4, 6), x(4, 6))),
    "addcmul": (torch.addcmul, (x(4, 6), x(4, 6), x(4, 6))),
    "addcdiv": (torch.addcdiv, (x(4, 6), x(4, 6), positive(4, 6))),
    "where": (torch.where, (mask(4, 6), x(4, 6), x(6))),
    "masked_fill": (torch.masked_fill, (x(4, 6), mask(4, 6), x())),
    "copysign": (torch.copysign, (x(4, 6), x(4, 6))),
    "xlogy": (torch.xlogy, (positive(4, 6), positive(4, 6))),
    "logaddexp": (torch.logaddexp, (x(4, 6), x(4, 6))),
    "prelu": (F.prelu, (x(4, 6), x(6))),
    "linear": (F.linear, (x(4, 6), x(5, 6), x(5))),
    "linear of three dims": (F.linear, (x(2, 4, 6), x(5, 6), x(5))),
    "linear of a transposed": (lambda a, w: F.linear(a.mT, w), (x(2, 6, 4), x(5, 6))),
    "linear of a slice": (lambda a, w: F.linear(a[:, 1:], w), (x(2, 4, 6), x(5, 6))),
    "mm": (torch.mm, (x(4, 6), x(6, 5))),
    "bmm": (torch.bmm, (x(2, 4, 6), x(2, 6, 5))),
    "addmm": (torch.addmm, (x(5), x(4, 6), x(6, 5))),
    "baddbmm": (torch.baddbmm, (x(2, 4, 5), x(2, 4, 6), x(2, 6, 5))),
    "mv": (torch.mv, (x(4, 6), x(6))),
    "dot": (torch.dot, (x(6), x(6))),
    "matmul": (torch.matmul, (x(2, 3, 4, 6), x(2, 3, 6, 5))),
    "matmul by a matrix": (torch.matmul, (x(2, 3, 4, 6), x(6, 5))),
    "matmul of a matrix": (torch.matmul, (x(5, 4), x(2, 3, 4, 6))),
    "matmul of a transposed": (lambda a, b: a.mT @ b, (x(2, 3, 6, 4), x(2, 3, 6, 5))),
    "matmul of heads": (lambda a, b: a.transpose(1, 2) @ b, (x(2, 4, 3, 6), x(2, 3, 6, 5))),
    "heads by a matrix": (lambda a, b: a.transpose(1, 2) @ b, (x(2, 4, 3, 6), x(6, 5))),
    "matmul of broadcast": (torch.matmul, (x(2, 3, 4, 6), x(2, 1, 6, 5))),
    "matmul by a vector": (torch.matmul, (x(2, 4, 6), x(6))),
    "einsum": (lambda a, b: torch.einsum("bqhe,bkhe->bhqk", a, b), (x(2, 4, 3, 6), x(2, 5, 3, 6))),
    "einsum of matrices": (lambda a, b: torch.einsum("...ij,jk", a, b), (x(2, 4, 6), x(6, 5))),
    "einsum outer": (lambda a, b: torch.einsum("i,j->ij", a, b), (x(4), x(6))),
    "einsum to a sum": (lambda a, b: torch.einsum("bnd,nd->b", a, b), (x(4, 3, 6), x(3, 6))),
    "conv1d": (F.conv1d, (x(2, 3, 8), x(4, 3, 3), x(4))),
    "conv2d": (F.conv2d, (x(2, 3, 8, 8), x(4, 3, 3, 3))),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), (x(2, 4, 6), x(6), x(6))),
    "layer_norm without bias": (lambda a: F.layer_norm(a, (4, 6)), (x(2, 4, 6),)),
    "rms_norm": (lambda a, w: F.rms_norm(a, (6,), w), (x(2, 4, 6), x(6))),
    "rms_norm without weight": (lambda a: F.rms_norm(a, (6,)), (x(2, 4, 6),)),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), (x(2, 4, 6), x(4), x(4))),
    "group_norm of a transposed": (lambda a: F.group_norm(a.mT, 2), (x(2, 4, 6),)),
    "batch_norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True), (x(4, 6, 5), x(6), x(6))),
    "batch_norm that is given": (
        lambda a, m, v, w, b: F.batch_norm(a, m.detach(), v.detach(), w, b),
        (x(4, 6, 5), x(6), positive(6), x(6), x(6)),
    ),
    "attention": (attend, (x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 6))),
    "causal attention": (
        lambda q, k, v: attend(q, k, v, is_causal=True),
        (x(2, 3, 4, 6), x(2, 3, 4, 6), x(2, 3, 4, 6)),
    ),
    "attention with a bool mask": (
        attend,
        (x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 6), torch.ones(4, 5, dtype=torch.bool)),
    ),
    "attention with a bias": (attend, (x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 6), x(1, 3, 4, 5))),
    "attention with one kv head": (attend, (x(2, 3, 4, 6), x(2, 1, 5, 6), x(2, 1, 5, 6))),
    "attention with wide values": (attend, (x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 8))),
    "grouped attention": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        (x(2, 4, 4, 6), x(2, 2, 5, 6), x(2, 2, 5, 6)),
    ),
    "attention of transposed": (
        lambda q, k, v: attend(*(y.transpose(1, 2) for y in (q, k, v))),
        (x(2, 4, 3, 6), x(2, 5, 3, 6), x(2, 5, 3, 6)),
    ),
    "embedding": (F.embedding, (ids(9, 4, 5), x(9, 6))),
    "index": (lambda a, i: a[i], (x(9, 6), ids(9, 4))),
    "index_select": (lambda a, i: a.index_select(0, i), (x(9, 6), ids(9, 4))),
    "index of rows": (lambda a, i, j: a[i, j], (x(9, 6), ids(9, 4), ids(6, 4))),
    "index_copy": (lambda a, i, b: a.index_copy(0, i, b), (x(9, 6), torch.randperm(9)[:4], x(4, 6))),
    "gather": (lambda a, i: a.gather(1, i), (x(4, 6), ids(6, 4, 2))),
    "scatter": (lambda a, i, b: a.scatter(1, i, b), (x(4, 6), ids(6, 4, 2), x(4, 2))),
    "scatter_add": (lambda a, i, b: a.scatter_add(1, i, b), (x(4, 6), ids(6, 4, 2), x(4, 2))),
    "index_add": (lambda a, i, b: a.index_add(0, i, b), (x(9, 6), ids(9, 4), x(4, 6))),
    "index_put": (lambda a, i, b: a.index_put((i,), b), (x(9, 6), ids(9, 4), x(4, 6))),
    "cat": (lambda a, b: torch.cat([a, b], 1), (x(4, 6), x(4, 2))),
    "stack": (lambda a, b: torch.stack([a, b]), (x(4, 6), x(4, 6))),
    "cross_entropy": (F.cross_entropy, (x(8, 6), ids(6, 8))),
    "cross_entropy of images": (F.cross_entropy, (x(2, 6, 3, 3), ids(6, 2, 3, 3))),
    "smoothed cross_entropy": (lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1), (x(8, 6), ids(6, 8))),
    "cross_entropy with distributions": (lambda a, t: F.cross_entropy(a, t.softmax(1).detach()), (x(8, 6), x(8, 6))),
    "instance_norm": (lambda a, w, b: F.instance_norm(a, weight=w, bias=b), (x(2, 4, 6), x(4), x(4))),
    "instance_norm that is given": (
        lambda a, m, v, w: F.instance_norm(a, m.detach(), v.detach(), w, use_input_stats=False),
        (x(2, 4, 6), x(4), positive(4), x(4)),
    ),
    "im2col": (lambda a: F.unfold(a, 2), (x(2, 3, 4, 4),)),
    "col2im": (lambda a: F.fold(a, (4, 4), 2), (x(2, 12, 9),)),
    "complex products": (
        lambda a, b: torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b)),
        (x(4, 6, 2), x(4, 6, 2)),
    ),
    "lstm_cell": (lambda a, h, c, *w: torch.lstm_cell(a, (h, c), *w), (x(4, 6), x(4, 2), x(4, 2), x(8, 6), x(8, 2))),
    "gru_cell": (torch.gru_cell, (x(4, 6), x(4, 2), x(6, 6), x(6, 2))),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w), (x(9, 6), ids(9, 2, 4))),
    "masked_scatter": (
        lambda a, f, m: a.masked_scatter(m[..., None].expand_as(a), f),
        (x(2, 4, 6), x(8, 6), mask(2, 4)),
    ),
    "weighted nll_loss": (lambda a, t, w: F.nll_loss(a, t, w.detach()), (x(8, 6), ids(6, 8), positive(6))),
    "nll_loss": (F.nll_loss, (x(8, 6), ids(6, 8))),
    "mse_loss": (F.mse_loss, (x(4, 6), x(4, 6))),
    "l1_loss": (F.l1_loss, (x(4, 6), x(4, 6))),
    "smooth_l1_loss": (F.smooth_l1_loss, (x(4, 6), x(4, 6))),
    "huber_loss": (F.huber_loss, (x(4, 6), x(4, 6))),
    "kl_div": (lambda a, b: F.kl_div(a, b.detach(), reduction="sum"), (x(4, 6), positive(4, 6))),
    "binary_cross_entropy": (lambda a, b: F.binary_cross_entropy(a, b.detach()), (positive(4, 6), positive(4, 6))),
    "binary_cross_entropy_with_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.detach()),
        (x(4, 6), positive(4, 6)),
    ),
    "soft_margin_loss": (lambda a, b: F.soft_margin_loss(a, b.detach()), (x(4, 6), x(4, 6))),
    "glu of a product": (lambda a, b: F.silu(a) * b, (x(4, 6), x(4, 6))),
    "dropout": (lambda a: F.dropout(a, 0.5), (x(4, 6),)),
    "dropped attention": (
        lambda q, k, v: attend(q, k, v, dropout_p=0.5),
        (x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 6)),
    ),
}


def gap_bytes(
    op: Callable[..., object], tensors: tuple[Tensor, ...], frozen: frozenset[int], unpriced_bytes: int = 0
) -> float:
    """Bytes that a program keeps for the backward of an op, beyond the priced and the unpriced ones."""
    model = Between(op, tensors, frozen)
    prepared = prepare_step(model, ())
    said, found = priced_bytes(prepared), program_kept_bytes(prepared, model, ())
    return found - said - unpriced_bytes


# Ops that keep their operand, their result, a mask, indices, a part, a copy, or nothing; the others keep as these do.
ONE_OF_EACH = {
    "abs",
    "ceil",
    "exp",
    "log",
    "sigmoid",
    "sqrt",
    "gelu",
    "glu",
    "hardtanh",
    "leaky_relu",
    "silu",
    "softplus",
    "pow",
    "clamp",
    "masked_fill",
    "to float32",
    "sum",
    "amax",
    "max",
    "max of all",
    "var",
    "logsumexp",
    "prod",
    "norm",
    "cumprod",
    "softmax",
    "softmax in float32",
    "topk",
    "pad",
    "reflect",
    "repeat",
    "split",
    "select",
    "expand",
    "expanded and saved",
    "reshape that copies",
    "transposed linear",
    "not on the way to the loss",
    "masked by zeros",
    "detached",
    "type_as itself",
    "avg_pool2d",
    "max_pool2d",
    "interpolate",
}
MANY_OF_EACH = {
    "mul",
    "div",
    "masked_fill",
    "prelu",
    "linear",
    "bmm",
    "matmul",
    "matmul by a matrix",
    "einsum",
    "conv2d",
    "layer_norm",
    "group_norm",
    "batch_norm",
    "attention with a bias",
    "grouped attention",
    "attention of transposed",
    "index",
    "scatter",
    "index_put",
    "cat",
    "cross_entropy",
    "smoothed cross_entropy",
    "cross_entropy with distributions",
    "complex products",
    "embedding_bag",
    "masked_scatter",
    "weighted nll_loss",
    "glu of a product",
    "dropped attention",
}


@pytest.mark.parametrize("name", often(ONE, ONE_OF_EACH))
def test_of_one_operand(name: str) -> None:
    assert gap_bytes(ONE[name], (positive(6, 8),), frozenset()) == 0


@pytest.mark.parametrize("name", often(MANY, MANY_OF_EACH))
def test_of_many_operands(name: str) -> None:
    op, tensors = MANY[name]
    taking = differentiable(op, tensors)
    assert taking
    for count in {0, len(taking) - 1}:  # every operand requires a gradient, and each of them alone
        for frozen in itertools.combinations(taking, count):
            unpriced_bytes = UNPRICED_BYTES.get(name, 0)
            assert gap_bytes(op, tensors, frozenset(frozen), unpriced_bytes) == 0, frozen


def differentiable(op: Callable[..., object], tensors: tuple[Tensor, ...]) -> list[int]:
    """The operands that get a gradient; an op may detach others, as it does its targets."""
    model = Between(op, tensors, frozenset())
    model().backward()
    return [int(name.removeprefix("x")) for name, x in model.named_parameters() if x.grad is not None]
