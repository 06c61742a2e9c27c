"""Normalization: the statistics, and the operands or copies of them, that norms keep for backward."""

from __future__ import annotations

import torch

from autopar.ops.attention_block import wide
from autopar.rules.kept.kernels import HALF, on_accelerator
from autopar.rules.spec import Call, Hidden, Kept, Letters, Spec


def _statistic(name: str, letters: Letters, call: Call, times: int = 1) -> Hidden:
    """One number per row, in float32. On the CPU it is in half precision where all operands are."""
    dtypes = {x.dtype for x in call.operands}
    own = call.operands[0].dtype
    wide = own in HALF and (on_accelerator(call) or torch.float32 in dtypes)
    return Hidden(name, letters, torch.float32 if wide else own, times)


def layer_norm(call: Call, spec: Spec) -> Kept:
    """layer_norm keeps its operands, and the mean and reciprocal deviation of every row."""
    x = call.operands[0]
    rows = spec.operands[0][: x.ndim - len(call["normalized_shape"])]
    names = ("mean", "rstd")
    hidden = tuple(_statistic(name, rows, call) for name in names)
    return Kept(tuple(range(len(call.operands))), (), hidden)


def rms_norm(call: Call, spec: Spec) -> Kept:
    """rms_norm is one kernel on accelerators; on the CPU it is pow, mean, rsqrt and two products."""
    x = call.operands[0]
    rows = spec.operands[0][: x.ndim - len(call["normalized_shape"])]
    exact = wide(x.dtype)
    root = Hidden("rstd", rows, exact)
    if on_accelerator(call):
        return Kept(tuple(range(len(call.operands))), (), (root,))
    hidden = [root] if 0 in call.wanted else []
    operands = list(range(len(call.operands))) if 0 in call.wanted else []
    if 0 in call.wanted and x.dtype in HALF:
        hidden.append(Hidden("wide", spec.operands[0], exact))
        operands.remove(0)
    if 1 in call.wanted:
        hidden.append(Hidden("normalized", spec.operands[0], exact))
    return Kept(tuple(operands), (), tuple(hidden))


def group_norm(call: Call, spec: Spec) -> Kept:
    """group_norm keeps statistics of every sample and group, and a contiguous copy of its input."""
    x = call.operands[0]
    names = ("mean", "rstd")
    rows = (spec.operands[0][0], tuple(x for x in spec.operands[0][1] if x == "g"))
    hidden = [_statistic(name, rows, call) for name in names]
    affine = tuple(i for i in range(1, min(2, len(call.operands))))
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return Kept((0, *affine), (), tuple(hidden))
    return Kept(affine, (), (*hidden, Hidden("copy0", spec.operands[0], x.dtype)))


def instance_norm(call: Call, spec: Spec) -> Kept:
    """instance_norm is a batch norm over the channels of all samples, with the weight repeated for every sample."""
    x, letters = call.operands[0], spec.operands[0][:2]
    hidden = [_statistic(name, letters, call) for name in ("mean", "rstd")]
    if call.arguments["weight"] is not None:
        hidden.append(Hidden("weight", letters, x.dtype))
    return Kept((0,), (), tuple(hidden))


def batch_norm(call: Call, spec: Spec) -> Kept:
    """batch_norm keeps all operands except the bias and, in training, the statistics of every channel."""
    nodes = call.operand_nodes
    operands = tuple(i for i, node in enumerate(nodes) if node is not call.arguments["bias"])
    if len(call.results) > 1:
        return Kept(operands, (1, 2))
    names = ("mean", "rstd") if call["training"] else ()
    channel = spec.operands[0][1:2]
    return Kept(operands, (), tuple(_statistic(name, channel, call) for name in names))
