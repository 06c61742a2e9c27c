"""type_as(x, y) -> _to_copy(x, dtype=dtype of y), and x itself where that is its own: of y only the type is read."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def read_types(module: fx.GraphModule) -> None:
    """A tensor of any shape may give its type; it would be moved, and bind layouts, for nothing."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.type_as.default)):
        value, model = node.args
        dtype = model.meta["val"].dtype
        if value.meta["val"].dtype is dtype:
            node.replace_all_uses_with(value)
            module.graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
    module.recompile()
