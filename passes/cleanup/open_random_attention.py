"""attention(q, k, v, dropout p) -> matmul, safe softmax, dropout, matmul.

Inside the attention op, all ranks would draw the dropout mask from equal generators, so that every part of the batch
would have the same mask. A separate dropout op draws it by a key, see [Note: keys of random ops].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from autopar.ops.nodes import bound_arguments, call_like

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default


def open_random_attention(module: fx.GraphModule) -> None:
    """Replaces attention with dropout by its single ops; with `enable_gqa` key and value heads are repeated first."""
    for node in module.graph.find_nodes(op="call_function", target=_ATTENTION):
        arguments = bound_arguments(node)
        if arguments["dropout_p"] > 0:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(_opened(module.graph, node))
            module.graph.erase_node(node)
    module.recompile()


def _opened(graph: fx.Graph, node: fx.Node) -> fx.Node:
    a = bound_arguments(node)
    query, key, value, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    shape = query.meta["val"].shape

    def call(target: object, *args: object, **kwargs: object) -> fx.Node:
        return call_like(graph, node, target, *args, **kwargs)

    if a["enable_gqa"]:
        key, value = (_repeated(call, x, shape[-3]) for x in (key, value))
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(shape[-1])
    scores = call(aten.matmul.default, query, call(aten.transpose.int, key, -2, -1))
    scores = call(aten.mul.Tensor, scores, scale)
    if a["is_causal"]:
        sizes = [shape[-2], key.meta["val"].shape[-2]]
        ones = call(aten.ones.default, sizes, dtype=torch.bool, device=query.meta["val"].device)
        mask = call(aten.tril.default, ones)
    if mask is not None and mask.meta["val"].dtype is torch.bool:
        hidden = call(aten.logical_not.default, mask)
        scores = call(aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten._safe_softmax.default, scores, -1)  # 0 for a query that sees nothing
    dropped = call(aten.native_dropout.default, weights, a["dropout_p"], True)
    kept = graph.call_function(operator.getitem, (dropped, 0))
    kept.meta = {**node.meta, "val": dropped.meta["val"][0]}
    return call(aten.matmul.default, kept, value)


def _repeated(call: Callable[..., fx.Node], x: fx.Node, heads: int) -> fx.Node:
    """(..., kv heads, keys, width) -> (..., heads, keys, width): each kv head, once for every of its group."""
    *batch, own, keys, width = x.meta["val"].shape
    if own == heads:
        return x
    apart = call(aten.unsqueeze.default, x, -3)
    wide = call(aten.expand.default, apart, [*batch, own, heads // own, keys, width])
    return call(aten.reshape.default, wide, [*batch, heads, keys, width])
