"""Rows: the operands and results that ops keep for backward, in a small notation.

A row names operands `x0`, `x1` ... and results `y0` ..., each with the operands whose gradient needs it:

    row   = [entry {";" entry}]               an empty row keeps nothing
    entry = tensor ["for" {position}]         without positions: whenever the op is recorded at all
    tensor = ("x" | "y") position [".."]      `x1..` all operands from the second on

The rows are those of PyTorch's derivatives.yaml (2.13) for ops that have a derivative of their own. For composite
functions they follow from the ops that these functions call. PyTorch's code generator keeps an operand that one formula
uses only where that gradient is wanted; it keeps an operand that several formulas use, or a result, always.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from autopar.rules import blocks, shape, views
from autopar.rules.spec import Call, Kept, Spec

Rule = Callable[[Call, Spec], Kept]


@functools.cache
def row(text: str) -> Rule:
    """The rule that a row describes."""
    entries = [_entry(part) for part in text.split(";") if part.strip()]

    def rule(call: Call, spec: Spec) -> Kept:
        found: dict[str, list[int]] = {"x": [], "y": []}
        for kind, first, last, wanting in entries:
            count = len(call.operands if kind == "x" else call.results)
            if wanting is None or wanting & call.wanted:
                found[kind] += range(first, min(count, last))
        return Kept(tuple(dict.fromkeys(found["x"])), tuple(dict.fromkeys(found["y"])))

    return rule


def _entry(text: str) -> tuple[str, int, int, frozenset[int] | None]:
    match = re.fullmatch(r"\s*([xy])(\d+)(\.\.)?(?: for ([\d ]+))?\s*", text)
    if not match:
        raise ValueError(f"Cannot read {text!r}; write x0, y1, x1.. or x0 for 1 2.")
    first = int(match[2])
    wanting = frozenset(map(int, match[4].split())) if match[4] else None
    return match[1], first, 1 << 30 if match[3] else first + 1, wanting


def _rows(text: str, *names: str) -> dict[str, str]:
    return {f"aten.{name}": text for name in " ".join(names).split()}


ROWS: dict[str, str] = {
    **dict.fromkeys([*views.RULES, *shape.RULES, *blocks.RULES], ""),
    **_rows("", """
        add sub rsub neg positive clone alias detach _to_copy type_as copy ceil floor round trunc frac
        sign deg2rad rad2deg real imag sum mean cumsum tril triu any all
        repeat_interleave unfold as_strided diff pixel_shuffle pixel_unshuffle im2col col2im
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa broadcast_tensors
        affine_grid_generator trapezoid trapz
    """),
    **_rows("y0", """
        exp exp2 expm1 sigmoid tanh tan sqrt rsqrt reciprocal relu softmax _softmax _safe_softmax
        log_softmax _log_softmax
    """),
    **_rows("x0", """
        abs acos acosh angle asin asinh atan atanh celu clamp_max clamp_min cos cosh digamma elu erf
        erfc erfinv gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma log log10
        log1p log2 logit mish nan_to_num polygamma silu selu sin sinc sinh softplus
        softshrink threshold square var var_mean avg_pool1d avg_pool2d avg_pool3d where
    """),
    **_rows("x0; y0", "amax amin std logsumexp prod norm linalg_vector_norm cumprod sgn logcumsumexp"),
    **_rows("x0; y0..", "aminmax"),
    **_rows("y1", "topk sort kthvalue median mode native_dropout"),
    **_rows("x0; y1", "max_pool2d_with_indices adaptive_max_pool2d cummax cummin"),
    **_rows("x1 for 0; x0 for 1", "mul bmm mm mv dot _grouped_mm"),
    **_rows("x1; x0 for 1", "div true_divide"),
    **_rows("x1 for 2; x2 for 1", "addmm baddbmm addbmm addcmul addmv"),
    **_rows("x2; x1 for 2", "addcdiv"),
    **_rows("x2; x0 for 2; x1 for 2", "lerp"),
    **_rows("x0 for 0; y0", "copysign"),
    **_rows("x0 for 0; x1 for 1; y0", "hypot"),
    **_rows("x0..; y0", "scatter_reduce"),
    **_rows("x1 for 2", "scatter_add"),
    **_rows("x1 for 2; x2 for 2", "index_add"),
    **_rows("x1; x2 for 2", "index_copy"),
    **_rows("x0 for 1; x1 for 1", "fmod remainder"),
    **_rows("x1", "masked_fill masked_select"),
    # Both operands of a convolution are arguments of its one backward function.
    "transformers.grouped_mm_fallback": "x0; x1",
    **_rows("x0; x1", "conv1d conv2d conv3d convolution gather"),
    **_rows("x0..", "nll_loss_nd"),
    **_rows("x1..; y1..", "embedding_bag"),
    **_rows("x0 for 2; x1 for 3; x2 for 0; x3 for 1; y0", "rnn_tanh_cell rnn_relu_cell"),
    **_rows("x1; x0 for 1", "kl_div"),
    **_rows("x0..; y1; y2", "native_layer_norm"),
}  # fmt: skip

NOT_DIFFERENTIABLE = frozenset(
    f"aten.{name}"
    for name in (
        "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
        "new_zeros", "new_ones", "new_full", "new_empty", "bernoulli", "histc", "heaviside",
    )
)  # fmt: skip
