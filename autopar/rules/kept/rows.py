"""Rows: the operands and results that ops keep for backward, in a small notation.

A row names operands `x0`, `x1` ... and results `y0` ..., each with the operands whose gradient needs it:

    row    = [entry {";" entry}]              an empty row keeps nothing
    entry  = {tensor} ["for" {position}]      without positions: whenever the op is recorded at all
           | [number] "[" {letter} "]" format as many tensors of the op's own, with these letters of its rule; the
                                              format is float32, say, or x0 for that of operand 0
    tensor = ("x" | "y") position [".."]      `x1..` all operands from the second on

`x0 x1 y0; 2 [b s] float32` keeps two operands, the result, and two numbers for every b and s.

The rows are those of PyTorch's derivatives.yaml (2.13) for ops that have a derivative of their own. For composite
functions they follow from the ops that these functions call. PyTorch's code generator keeps an operand that one formula
uses only where that gradient is wanted; it keeps an operand that several formulas use, or a result, always.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from autopar.rules import blocks, shape, views
from autopar.rules.notation import in_order
from autopar.rules.spec import Call, Hidden, Kept, Spec, aten_ops

Rule = Callable[[Call, Spec], Kept]


@functools.cache
def row(text: str) -> Rule:
    """The rule that a row describes. Raises ValueError that names an entry which cannot be read."""
    entries = [each for part in text.split(";") if part.strip() for each in _entries(part)]

    def rule(call: Call, spec: Spec) -> Kept:
        found: dict[str, list[int]] = {"x": [], "y": []}
        hidden: list[Hidden] = []
        for each in entries:
            if isinstance(each, _Own):
                hidden.append(each.of(f"saved{len(hidden)}", call, spec))
            elif each.wanting is None or each.wanting & call.wanted:
                count = len(call.operands if each.kind == "x" else call.results)
                found[each.kind] += range(each.first, min(count, each.end))
        return Kept(tuple(dict.fromkeys(found["x"])), tuple(dict.fromkeys(found["y"])), tuple(hidden))

    return rule


class _Tensors(NamedTuple):
    """Operands or results that an op keeps, and the operands whose gradient needs them."""

    kind: str
    first: int
    end: int
    wanting: frozenset[int] | None


class _Own(NamedTuple):
    """Tensors that an op keeps and that are none of the graph."""

    times: int
    letters: tuple[str, ...]
    dtype: torch.dtype | int

    def of(self, name: str, call: Call, spec: Spec) -> Hidden:
        letters = tuple((x,) for x in in_order(self.letters, spec.sizes))
        dtype = call.operands[self.dtype].dtype if isinstance(self.dtype, int) else self.dtype
        return Hidden(name, letters, dtype, self.times)


def _entries(text: str) -> Iterator[_Tensors | _Own]:
    if own := re.fullmatch(r"\s*(\d+)?\s*\[([\w\s]*)\]\s*(\w+)\s*", text):
        like = re.fullmatch(r"x(\d+)", own[3])
        dtype = int(like[1]) if like else getattr(torch, own[3], None)
        if not isinstance(dtype, int | torch.dtype):
            raise ValueError(f"Cannot read the format {own[3]!r} in {text!r}; write float32, say.")
        yield _Own(int(own[1] or 1), tuple(own[2].split()), dtype)
        return
    tensors, _, positions = text.partition(" for ")
    wanting = frozenset(map(int, positions.split())) if positions else None
    for word in tensors.split():
        match = re.fullmatch(r"([xy])(\d+)(\.\.)?", word)
        if not match:
            raise ValueError(f"Cannot read {word!r} in {text!r}; write x0 y1, x1.., x0 for 1 2 or [b s] float32.")
        first = int(match[2])
        yield _Tensors(match[1], first, 1 << 30 if match[3] else first + 1, wanting)


ROWS: dict[str, str] = {
    **dict.fromkeys([*views.RULES, *shape.RULES, *blocks.RULES], ""),
    **aten_ops(
        "",
        """
        add sub rsub neg positive clone alias detach _to_copy type_as copy ceil floor round trunc frac
        sign deg2rad rad2deg real imag sum mean cumsum tril triu any all
        repeat_interleave unfold as_strided diff pixel_shuffle pixel_unshuffle im2col col2im
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa broadcast_tensors
        affine_grid_generator trapezoid trapz
    """,
    ),
    **aten_ops(
        "y0",
        """
        exp exp2 expm1 sigmoid tanh tan sqrt rsqrt reciprocal relu softmax _softmax _safe_softmax
        log_softmax _log_softmax
    """,
    ),
    **aten_ops(
        "x0",
        """
        abs acos acosh angle asin asinh atan atanh celu clamp_max clamp_min cos cosh digamma elu erf
        erfc erfinv gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma log log10
        log1p log2 logit mish nan_to_num polygamma silu selu sin sinc sinh softplus
        softshrink threshold square var var_mean avg_pool1d avg_pool2d avg_pool3d where
    """,
    ),
    **aten_ops("x0; y0", "amax amin std logsumexp prod norm linalg_vector_norm cumprod sgn logcumsumexp"),
    **aten_ops("x0; y0..", "aminmax"),
    **aten_ops("y1", "topk sort kthvalue median mode native_dropout"),
    **aten_ops("x0; y1", "max_pool2d_with_indices adaptive_max_pool2d cummax cummin"),
    **aten_ops("x1 for 0; x0 for 1", "mul bmm mm mv dot _grouped_mm"),
    **aten_ops("x1; x0 for 1", "div true_divide"),
    **aten_ops("x1 for 2; x2 for 1", "addmm baddbmm addbmm addcmul addmv"),
    **aten_ops("x2; x1 for 2", "addcdiv"),
    **aten_ops("x2; x0 for 2; x1 for 2", "lerp"),
    **aten_ops("x0 for 0; y0", "copysign"),
    **aten_ops("x0 for 0; x1 for 1; y0", "hypot"),
    **aten_ops("x0..; y0", "scatter_reduce"),
    **aten_ops("x1 for 2", "scatter_add"),
    **aten_ops("x1 for 2; x2 for 2", "index_add"),
    **aten_ops("x1; x2 for 2", "index_copy"),
    **aten_ops("x0 for 1; x1 for 1", "fmod remainder"),
    **aten_ops("x1", "masked_fill masked_select"),
    # Both operands of a convolution are arguments of its one backward function.
    "transformers.grouped_mm_fallback": "x0; x1",
    **aten_ops("x0; x1", "conv1d conv2d conv3d convolution gather"),
    **aten_ops("x0..", "nll_loss_nd"),
    **aten_ops("x1..; y1..", "embedding_bag"),
    **aten_ops("x0 for 2; x1 for 3; x2 for 0; x3 for 1; y0", "rnn_tanh_cell rnn_relu_cell"),
    **aten_ops("x1; x0 for 1", "kl_div"),
    **aten_ops("x0..; y1; y2", "native_layer_norm"),
}

NOT_DIFFERENTIABLE = frozenset(
    aten_ops(
        None,
        """
    detach zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    bernoulli histc heaviside
    """,
    )
)
