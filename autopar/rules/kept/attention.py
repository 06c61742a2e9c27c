"""Attention: what a fused kernel keeps for backward, and what two products with a softmax between them keep."""

from __future__ import annotations

import math

import torch

from autopar.ops.attention_block import wide
from autopar.rules.kept.kernels import HALF, on_accelerator
from autopar.rules.spec import Call, Hidden, Kept, Spec, flattens


def attention(call: Call, spec: Spec) -> Kept:
    """A fused kernel keeps its operands, the result and the log-sum-exp of every query."""
    if not is_fused_attention(call):
        return _open_attention(call, spec)
    query = call.operands[0].dtype
    exact = torch.float32 if query in HALF or on_accelerator(call) else query
    hidden = [Hidden("logsumexp", spec.results[0][:-1], exact)]
    operands = [0, 1, 2]
    if len(call.operands) == 4:
        if call.operands[3].dtype is torch.bool:  # the kernel turns it into an addend first
            hidden.append(Hidden("mask", spec.operands[3], query))
        else:
            operands.append(3)
    return Kept(tuple(operands), (0,), tuple(hidden))


def is_fused_attention(call: Call) -> bool:
    """Whether scaled_dot_product_attention runs as one kernel (sdp_utils of PyTorch 2.13)."""
    query, key, value = call.operands[:3]
    heads = call.arguments.get("enable_gqa") or query.shape[-3:-2] == key.shape[-3:-2]
    alike = query.ndim == 4 and heads and query.shape[0] == key.shape[0] == value.shape[0]
    if not alike or key.shape[-3] != value.shape[-3] or call["dropout_p"]:
        return False
    if on_accelerator(call):
        return query.dtype is not torch.float64
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    dense = all(x.stride(-1) == 1 for x in call.operands[:3])
    return same_width and dense and not call.wanted.intersection(range(3, len(call.operands)))


def _open_attention(call: Call, spec: Spec) -> Kept:
    """The tensors saved by two products with a softmax between them; in half precision they use float32 copies."""
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
