"""What every op keeps for backward, one row (or one small function) per family.

A row names operands `x0`, `x1` ... and results `y0` ..., each with the operands whose gradient needs it:

    row   = [entry {";" entry}]               an empty row keeps nothing
    entry = tensor ["for" {position}]         without positions: whenever the op is recorded at all
    tensor = ("x" | "y") position [".."]      `x1..` all operands from the second on

The rows are those of PyTorch's derivatives.yaml (2.13) for ops that have a derivative of their own, and
what its composite functions come down to for the others. By its code generator an operand that one
formula uses is kept for that one, and what several use, or a result, always. An op without a row keeps
all its operands. tests/rules/test_kept.py holds the rows against autograd.

What is kept and is no tensor of the graph (a mask, statistics, a contiguous copy) is a `Hidden`; its
letters are those of the op, so that it divides as the op's other tensors do.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import torch
from torch import fx

from autopar.ops.attention_block import wide
from autopar.rules import blocks, shape, views
from autopar.rules.contract import equation
from autopar.rules.spec import Call, Hidden, Kept, Letters, Spec, flattens

HALF = (torch.float16, torch.bfloat16)


Rule = Callable[[Call, Spec], Kept]


def kept(name: str, call: Call, spec: Spec) -> Kept:
    """What a call of the op `name` keeps; nothing where no gradient is wanted."""
    if not call.wanted or name in NOT_DIFFERENTIABLE:
        return Kept()
    rule = FUNCTIONS.get(name)
    return rule(call, spec) if rule else row(ROWS.get(name, "x0.."))(call, spec)


# --- rows


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


# --- indices


def _indices(call: Call, spec: Spec) -> Kept:
    """Lookups and scatters keep where they read or wrote, and no values."""
    return Kept(tuple(i for i, x in enumerate(call.operands) if not x.is_floating_point()))


# --- element-wise


def _power(call: Call, spec: Spec) -> Kept:
    """pow: the result too, unless the exponent is a number."""
    is_number = not isinstance(call["exponent"], fx.Node)
    return row("x0" if is_number else "x0..; y0")(call, spec)


def _extremum(call: Call, spec: Spec) -> Kept:
    """min, max: of two tensors both; along a dim the positions; of all elements, where they equal it."""
    if len(call.operands) == 2:
        return Kept((0, 1))
    return Kept((), (1,)) if len(call.results) == 2 else Kept((0,), (0,))


def _absolute_difference(call: Call, spec: Spec) -> Kept:
    """l1_loss is |x - y|, and keeps x - y."""
    return Kept(hidden=(Hidden("difference", spec.results[0], call.results[0].dtype),))


def _log_sigmoid(call: Call, spec: Spec) -> Kept:
    """log_sigmoid: on the CPU the exponential too."""
    buffer = Hidden("exponential", spec.results[0], call.results[0].dtype)
    return Kept((0,), (), () if _on_accelerator(call) else (buffer,))


def _pad(call: Call, spec: Spec) -> Kept:
    """pad: reflections keep what they reflect."""
    return Kept(() if call["mode"] == "constant" else (0,))


# --- products


def _matmul(call: Call, spec: Spec) -> Kept:
    """matmul: of each factor what the other's gradient needs, copied where it cannot be seen as rows of
    one matrix (beside a single matrix whose gradient is wanted) or as matrices of one batch dim.
    """
    operands, hidden = [], []
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in call.operands))
    for i, x in enumerate(call.operands):
        if 1 - i not in call.wanted:
            continue
        if _is_matrix_already(x, call.operands[1 - i], batch, is_left=i == 0):
            operands.append(i)
        else:
            letters = (*spec.results[0][: len(batch)], *spec.operands[i][-2:])
            hidden.append(Hidden(f"copy{i}", letters, x.dtype))
    return Kept(tuple(operands), (), tuple(hidden))


def _is_matrix_already(
    x: torch.Tensor, other: torch.Tensor, batch: torch.Size, *, is_left: bool
) -> bool:
    """Whether matmul takes `x` as it lies; see should_fold in ATen/native/LinearAlgebra.cpp."""
    if x.ndim < 3:
        return True
    if other.ndim < 3:
        rows = x if is_left else x.mT
        return flattens(rows, (-1, rows.shape[-1]))
    matrix = x.shape[-2:]
    return flattens(x, (*batch, *matrix), (math.prod(batch), *matrix))


def _linear(call: Call, spec: Spec) -> Kept:
    """linear: rows of all leading dims together, copied where their strides do not allow that."""
    x = call.operands[0]
    operands = [i for i, other in ((0, 1), (1, 0)) if other in call.wanted]
    if 0 in operands and not flattens(x, (-1, x.shape[-1])):
        copied = Hidden("copy0", spec.operands[0], x.dtype)
        return Kept(tuple(operands[1:]), (), (copied,))
    return Kept(tuple(operands))


def _float8_linear(call: Call, spec: Spec) -> Kept:
    """float8_linear: both operands as they are, since backward rounds the weight along its other dim."""
    return Kept(tuple(i for i, other in ((0, 1), (1, 0)) if other in call.wanted))


def _einsum(call: Call, spec: Spec) -> Kept:
    """einsum of two: a batched product over the letters that go; of one: permutations and sums."""
    names, out = equation(call)
    if len(names) == 1:
        return Kept()
    gone = sorted((set(names[0]) & set(names[-1])) - set(out))
    if len(names) > 2 or any(len(set(n)) < len(n) for n in names) or _broadcasts(names, call):
        return row("x0..")(call, spec)
    if not gone:
        return row("x1 for 0; x0 for 1")(call, spec)
    both = [x for x in out if x in names[0] and x in names[1]]
    operands, hidden = [], []
    for i, x in enumerate(call.operands):
        if 1 - i not in call.wanted:
            continue
        own = [n for n in out if n in names[i] and n not in both]
        groups = (both, own, gone) if i == 0 else (both, gone, own)
        order = [names[i].index(n) for group in groups for n in group]
        sizes = [math.prod(x.shape[names[i].index(n)] for n in group) for group in groups]
        if len(order) == x.ndim and flattens(x.permute(order), sizes):
            operands.append(i)
        else:
            hidden.append(Hidden(f"copy{i}", spec.operands[i], x.dtype))
    return Kept(tuple(operands), (), tuple(hidden))


def _broadcasts(names: list[list[str]], call: Call) -> bool:
    """Whether a letter has another size in one operand than in the other."""
    left, right = (
        dict(zip(n, x.shape, strict=True)) for n, x in zip(names, call.operands, strict=True)
    )
    return any(left[n] != right[n] for n in left.keys() & right.keys())


# --- attention


def _attention(call: Call, spec: Spec) -> Kept:
    """A fused kernel keeps its operands, the result and the log-sum-exp of every query."""
    if not is_fused_attention(call):
        return _open_attention(call, spec)
    query = call.operands[0].dtype
    exact = torch.float32 if query in HALF or _on_accelerator(call) else query
    hidden = [Hidden("logsumexp", spec.results[0][:-1], exact)]
    operands = [0, 1, 2]
    if len(call.operands) == 4:
        if call.operands[3].dtype is torch.bool:  # it is made an addend first
            hidden.append(Hidden("mask", spec.operands[3], query))
        else:
            operands.append(3)
    return Kept(tuple(operands), (0,), tuple(hidden))


def _on_accelerator(call: Call) -> bool:
    """A model on the meta device is meant for one."""
    return call.operands[0].device.type != "cpu"


def is_fused_attention(call: Call) -> bool:
    """Whether scaled_dot_product_attention runs as one kernel (sdp_utils of PyTorch 2.13)."""
    query, key, value = call.operands[:3]
    heads = call.arguments.get("enable_gqa") or query.shape[-3:-2] == key.shape[-3:-2]
    alike = query.ndim == 4 and heads and query.shape[0] == key.shape[0] == value.shape[0]
    if not alike or key.shape[-3] != value.shape[-3] or call["dropout_p"]:
        return False
    if _on_accelerator(call):
        return query.dtype is not torch.float64
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    dense = all(x.stride(-1) == 1 for x in call.operands[:3])
    return same_width and dense and not call.wanted.intersection(range(3, len(call.operands)))


def _open_attention(call: Call, spec: Spec) -> Kept:
    """Two products with a softmax between them; half precision is widened first."""
    query, value = call.operands[0], call.operands[2]
    dtype = wide(query.dtype)
    batch, rows = spec.results[0][:-2], spec.results[0][-2]
    (keys, inner), width = spec.operands[1][-2:], spec.operands[2][-1]
    hidden: list[Hidden] = [Hidden("weights", (*batch, rows, keys), dtype)]
    if 1 in call.wanted:
        hidden.append(Hidden("query", (*batch, rows, inner), dtype))
    if 0 in call.wanted:
        hidden.append(Hidden("key", (*batch, keys, inner), dtype))
    if not call.wanted - {2}:
        return Kept((), (), tuple(hidden))
    expanded = (*call.results[0].shape[:-2], *value.shape[-2:])
    flat = (math.prod(expanded[:-2]), *expanded[-2:])
    grouped = call.arguments.get("enable_gqa") and value.shape[-3] != query.shape[-3]
    if grouped or dtype != value.dtype or not flattens(value, expanded, flat):
        return Kept((), (), (*hidden, Hidden("value", (*batch, keys, width), dtype)))
    return Kept((2,), (), tuple(hidden))


# --- normalization and pooling


def _statistic(name: str, letters: Letters, call: Call, times: int = 1) -> Hidden:
    """One number of every row: in float32, but on the CPU, where nothing else is, in half precision."""
    dtypes = {x.dtype for x in call.operands}
    own = call.operands[0].dtype
    wide = own in HALF and (_on_accelerator(call) or torch.float32 in dtypes)
    return Hidden(name, letters, torch.float32 if wide else own, times)


def _layer_norm(call: Call, spec: Spec) -> Kept:
    """layer_norm: a mean and a reciprocal deviation of every row."""
    x = call.operands[0]
    rows = spec.operands[0][: x.ndim - len(call["normalized_shape"])]
    names = ("mean", "rstd")
    hidden = tuple(_statistic(name, rows, call) for name in names)
    return Kept(tuple(range(len(call.operands))), (), hidden)


def _rms_norm(call: Call, spec: Spec) -> Kept:
    """rms_norm: one kernel on accelerators; on the CPU pow, mean, rsqrt and two products."""
    x = call.operands[0]
    rows = spec.operands[0][: x.ndim - len(call["normalized_shape"])]
    exact = wide(x.dtype)
    root = Hidden("rstd", rows, exact)
    if _on_accelerator(call):
        return Kept(tuple(range(len(call.operands))), (), (root,))
    hidden = [root] if 0 in call.wanted else []
    operands = list(range(len(call.operands))) if 0 in call.wanted else []
    if 0 in call.wanted and x.dtype in HALF:
        hidden.append(Hidden("wide", spec.operands[0], exact))
        operands.remove(0)
    if 1 in call.wanted:
        hidden.append(Hidden("normalized", spec.operands[0], exact))
    return Kept(tuple(operands), (), tuple(hidden))


def _group_norm(call: Call, spec: Spec) -> Kept:
    """group_norm: statistics of every sample and group; it works on a contiguous copy."""
    x = call.operands[0]
    names = ("mean", "rstd")
    rows = (spec.operands[0][0], tuple(x for x in spec.operands[0][1] if x == "g"))
    hidden = [_statistic(name, rows, call) for name in names]
    affine = tuple(i for i in range(1, min(2, len(call.operands))))
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return Kept((0, *affine), (), tuple(hidden))
    return Kept(affine, (), (*hidden, Hidden("copy0", spec.operands[0], x.dtype)))


def _instance_norm(call: Call, spec: Spec) -> Kept:
    """instance_norm: a batch norm of all samples' channels, whose weight is repeated for every sample."""
    x, letters = call.operands[0], spec.operands[0][:2]
    hidden = [_statistic(name, letters, call) for name in ("mean", "rstd")]
    if call.arguments["weight"] is not None:
        hidden.append(Hidden("weight", letters, x.dtype))
    return Kept((0,), (), tuple(hidden))


def _recurrent(call: Call, spec: Spec) -> Kept:
    """lstm, gru: about six numbers for every output of every layer (gates, cells), over all steps."""
    hidden = Hidden("steps", spec.results[0], call.operands[0].dtype, 6 * call["num_layers"])
    return Kept(tuple(range(len(call.operands))), (0,), (hidden,))


def _cell(text: str, times: int) -> Rule:
    """What a row says, and of every unit its gates and what they are multiplied with."""

    def rule(call: Call, spec: Spec) -> Kept:
        hidden = Hidden("gates", spec.results[0], call.operands[0].dtype, times)
        return row(text)(call, spec)._replace(hidden=(hidden,))

    return rule


def _batch_norm(call: Call, spec: Spec) -> Kept:
    """batch_norm: all but the bias, and the statistics of every channel where it is training."""
    nodes = call.operand_nodes
    operands = tuple(i for i, node in enumerate(nodes) if node is not call.arguments["bias"])
    if len(call.results) > 1:
        return Kept(operands, (1, 2))
    names = ("mean", "rstd") if call["training"] else ()
    channel = spec.operands[0][1:2]
    return Kept(operands, (), tuple(_statistic(name, channel, call) for name in names))


def _max_pool(call: Call, spec: Spec) -> Kept:
    """max_pool1d, max_pool2d: where the maxima were."""
    return Kept((0,), (), (Hidden("indices", spec.results[0], torch.int64),))


def _adaptive_pool(call: Call, spec: Spec) -> Kept:
    """adaptive_avg_pool: a mean where the result is a single point."""
    spatial = int(re.findall(r"pool(\d)d", str(call.node.target))[0])
    one = all(size == 1 for size in call.results[0].shape[-spatial:])
    return Kept(() if one else (0,))


# --- loss


def _cross_entropy(call: Call, spec: Spec) -> Kept:
    """cross_entropy_loss: log-probabilities of all classes and the targets; not the logits."""
    hidden = Hidden("log_probabilities", spec.operands[0], call.operands[0].dtype)
    return Kept(tuple(range(1, len(call.operands))), (), (hidden,))


FUNCTIONS: dict[str, Rule] = {
    **{
        f"aten.{name}": _indices
        for name in (
            "embedding", "index", "index_select", "index_put", "scatter", "index_fill", "masked_scatter",
        )
    },
    "aten.pow": _power,
    "aten.log_sigmoid": _log_sigmoid,
    "aten.pad": _pad,
    "aten.max": _extremum,
    "aten.min": _extremum,
    "aten.l1_loss": _absolute_difference,
    "aten.matmul": _matmul,
    "aten.linear": _linear,
    "autopar.float8_linear": _float8_linear,
    "aten.einsum": _einsum,
    "aten.scaled_dot_product_attention": _attention,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
    "aten.group_norm": _group_norm,
    **{
        f"aten.{name}": _batch_norm
        for name in (
            "batch_norm", "native_batch_norm", "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
        )
    },
    "aten.instance_norm": _instance_norm,
    **{f"aten.{name}": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "aten.lstm_cell": _cell("x0 for 3; x1 for 4; x2 for 0 1 3 4 5 6; x3 for 0; x4 for 1", 5),
    "aten.gru_cell": _cell("x0 for 2; x1 for 3; x2 for 0; x3 for 1", 6),
    "aten.max_pool1d": _max_pool,
    "aten.max_pool3d": _max_pool,
    "aten.max_pool2d": _max_pool,
    "aten.adaptive_avg_pool1d": _adaptive_pool,
    "aten.adaptive_avg_pool2d": _adaptive_pool,
    "aten.cross_entropy_loss": _cross_entropy,
}  # fmt: skip
