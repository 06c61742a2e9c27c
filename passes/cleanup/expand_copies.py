"""copy(x, y) -> expand(y to x's dtype, x's shape): all of x is overwritten, and copy has no derivative."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.nodes import call_like

aten = torch.ops.aten


def expand_copies(module: fx.GraphModule) -> None:
    """Replaces `copy` calls, to which the functional graph turns `x[...] = y`, by `expand`, which has a gradient."""
    for node in module.graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = node.args[:2]
        like, value = target.meta["val"], source.meta["val"]
        with module.graph.inserting_before(node):
            if value.dtype != like.dtype:
                source = call_like(module.graph, node, aten._to_copy.default, source, dtype=like.dtype)
            if value.shape != like.shape:
                source = call_like(module.graph, node, aten.expand.default, source, list(like.shape))
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()
