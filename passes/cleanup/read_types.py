"""Replaces a tensor operand of which an op reads only the dtype by this dtype.

type_as(x, y)       ->  _to_copy(x, dtype=dtype of y), and x itself where that is its own
new_empty(y, size)  ->  empty(size, dtype=dtype of y), as Dropout2d has it
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def read_types(module: fx.GraphModule) -> None:
    """Replaces such calls. Otherwise the tensor would be converted to a layout although its values are not used."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.type_as.default)):
        value, model = node.args
        dtype = model.meta["val"].dtype
        if value.meta["val"].dtype is dtype:
            node.replace_all_uses_with(value)
            module.graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
    for node in module.graph.find_nodes(op="call_function", target=aten.new_empty.default):
        made = node.meta["val"]
        node.target, node.args = aten.empty.memory_format, (list(made.shape),)
        node.kwargs = {"dtype": made.dtype, "device": made.device}
    module.recompile()
