"""attention(q, k, v, dropout p) -> matmul, softmax, dropout, matmul.

Inside one op the mask would come from the generator that all ranks share, the same for every part of the
batch. In the open it is drawn by key, see [Note: keys of random ops].
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from autopar.passes.build import call_like
from autopar.rules.spec import bound_arguments

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default


def open_random_attention(module: fx.GraphModule) -> None:
    """Opens attention with dropout; with `enable_gqa` it is left whole."""
    for node in module.graph.find_nodes(op="call_function", target=_ATTENTION):
        arguments = bound_arguments(node)
        if arguments["dropout_p"] > 0 and not arguments["enable_gqa"]:
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
    weights = call(aten.softmax.int, scores, -1)
    dropped = call(aten.native_dropout.default, weights, a["dropout_p"], True)
    kept = graph.call_function(operator.getitem, (dropped, 0))
    kept.meta = {**node.meta, "val": dropped.meta["val"][0]}
    return call(aten.matmul.default, kept, value)
