"""cat([tensor([]), x], d) -> x: torch lets a tensor of shape (0,) be joined to any other, to which it adds nothing.

A cache of keys and values, such as `DynamicCache` of transformers, begins with it. It has none of the dims of x, so
that the op could not be split along any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

aten = torch.ops.aten


def drop_empty_operands(module: fx.GraphModule) -> None:
    """Leaves operands of shape (0,) out of every `cat` that has others; a `cat` of a single operand is a copy of it."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.cat.default)):
        operands, *dim = node.args
        empty = [x for x in operands if _is_empty(x)]
        kept = [x for x in operands if not _is_empty(x)]
        if not empty or not kept or _dtype(kept) != node.meta["val"].dtype:
            continue
        node.args = (kept, *dim)
        if len(kept) == 1:
            node.target, node.args, node.kwargs = aten.clone.default, (kept[0],), {}
        for each in dict.fromkeys(empty):
            if not each.users and each.op == "call_function":
                module.graph.erase_node(each)
    module.recompile()


def _is_empty(node: fx.Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


def _dtype(operands: Sequence[fx.Node]) -> torch.dtype:
    """The dtype of a `cat`, in which an operand without elements counts."""
    dtype: torch.dtype = operands[0].meta["val"].dtype
    for each in operands[1:]:
        dtype = torch.promote_types(dtype, each.meta["val"].dtype)
    return dtype
