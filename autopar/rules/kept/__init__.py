"""The tensors that every op saves for backward: one row, or one small function, per family.

`rows` holds the rows and their notation; ops whose saved tensors depend on more than the wanted gradients have a
function here or in the module of their family. An op without either keeps all its operands. tests/rules/test_kept.py
compares all of them with what autograd saves.

A saved tensor that is not a tensor of the graph (a mask, statistics, a contiguous copy) is a `Hidden`. Its letters are
those of the op, so that a choice which splits the op's tensors splits it too.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from autopar.rules.kept.attention import attention
from autopar.rules.kept.kernels import on_accelerator
from autopar.rules.kept.normalization import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from autopar.rules.kept.products import einsum, float8_linear, linear, matmul
from autopar.rules.kept.rows import NOT_DIFFERENTIABLE, ROWS, Rule, row
from autopar.rules.spec import Call, Hidden, Kept, Spec, aten_ops


def kept(name: str, call: Call, spec: Spec) -> Kept:
    """The tensors that a call of the op `name` keeps for backward; none where no gradient is wanted."""
    if not call.wanted or name in NOT_DIFFERENTIABLE:
        return Kept()
    rule = FUNCTIONS.get(name)
    return rule(call, spec) if rule else row(ROWS.get(name, "x0.."))(call, spec)


# --- indices


def _indices(call: Call, spec: Spec) -> Kept:
    """Lookups and scatters keep the positions that they read or wrote, and no values."""
    return Kept(tuple(i for i, x in enumerate(call.operands) if not x.is_floating_point()))


# --- element-wise


def _power(call: Call, spec: Spec) -> Kept:
    """pow keeps its operands and, unless the exponent is a number, its result."""
    is_number = not isinstance(call["exponent"], fx.Node)
    return row("x0" if is_number else "x0..; y0")(call, spec)


def _extremum(call: Call, spec: Spec) -> Kept:
    """min and max keep both of two tensors; along a dim they keep positions; over all elements, operand and result."""
    if len(call.operands) == 2:
        return Kept((0, 1))
    return Kept((), (1,)) if len(call.results) == 2 else Kept((0,), (0,))


def _absolute_difference(call: Call, spec: Spec) -> Kept:
    """l1_loss computes |x - y| and keeps x - y."""
    return Kept(hidden=(Hidden("difference", spec.results[0], call.results[0].dtype),))


def _log_sigmoid(call: Call, spec: Spec) -> Kept:
    """log_sigmoid keeps its operand and, on the CPU, an exponential."""
    buffer = Hidden("exponential", spec.results[0], call.results[0].dtype)
    return Kept((0,), (), () if on_accelerator(call) else (buffer,))


def _pad(call: Call, spec: Spec) -> Kept:
    """pad keeps its operand where it reflects or replicates elements of it."""
    return Kept(() if call["mode"] == "constant" else (0,))


# --- normalization and pooling


def _recurrent(call: Call, spec: Spec) -> Kept:
    """lstm and gru keep about six numbers (gates, cells) for every output of every layer, over all steps."""
    hidden = Hidden("steps", spec.results[0], call.operands[0].dtype, 6 * call["num_layers"])
    return Kept(tuple(range(len(call.operands))), (0,), (hidden,))


def _cell(text: str, times: int) -> Rule:
    """A rule that keeps the tensors of a row and, for every unit, `times` numbers: its gates and their factors."""

    def rule(call: Call, spec: Spec) -> Kept:
        hidden = Hidden("gates", spec.results[0], call.operands[0].dtype, times)
        return row(text)(call, spec)._replace(hidden=(hidden,))

    return rule


def _max_pool(call: Call, spec: Spec) -> Kept:
    """max_pool keeps its operand and the positions of the maxima."""
    return Kept((0,), (), (Hidden("indices", spec.results[0], torch.int64),))


def _adaptive_pool(call: Call, spec: Spec) -> Kept:
    """adaptive_avg_pool keeps its operand, except where the result is a single point: then it is a mean."""
    spatial = int(re.findall(r"pool(\d)d", str(call.node.target))[0])
    one = all(size == 1 for size in call.results[0].shape[-spatial:])
    return Kept(() if one else (0,))


# --- loss


def _cross_entropy(call: Call, spec: Spec) -> Kept:
    """cross_entropy_loss keeps log-probabilities of all classes and the targets, but not the logits."""
    hidden = Hidden("log_probabilities", spec.operands[0], call.operands[0].dtype)
    return Kept(tuple(range(1, len(call.operands))), (), (hidden,))


FUNCTIONS: dict[str, Rule] = {
    **aten_ops(_indices, "embedding index index_select index_put scatter index_fill masked_scatter"),
    "aten.pow": _power,
    "aten.log_sigmoid": _log_sigmoid,
    "aten.pad": _pad,
    "aten.max": _extremum,
    "aten.min": _extremum,
    "aten.l1_loss": _absolute_difference,
    "aten.matmul": matmul,
    "aten.linear": linear,
    "autopar.float8_linear": float8_linear,
    "aten.einsum": einsum,
    "aten.scaled_dot_product_attention": attention,
    "aten.layer_norm": layer_norm,
    "aten.rms_norm": rms_norm,
    "aten.group_norm": group_norm,
    **aten_ops(
        batch_norm,
        """
        batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training
        """,
    ),
    "aten.instance_norm": instance_norm,
    **aten_ops(_recurrent, "lstm gru rnn_tanh rnn_relu"),
    "aten.lstm_cell": _cell("x0 for 3; x1 for 4; x2 for 0 1 3 4 5 6; x3 for 0; x4 for 1", 5),
    "aten.gru_cell": _cell("x0 for 2; x1 for 3; x2 for 0; x3 for 1", 6),
    "aten.max_pool1d": _max_pool,
    "aten.max_pool3d": _max_pool,
    "aten.max_pool2d": _max_pool,
    "aten.adaptive_avg_pool1d": _adaptive_pool,
    "aten.adaptive_avg_pool2d": _adaptive_pool,
    "aten.cross_entropy_loss": _cross_entropy,
}
