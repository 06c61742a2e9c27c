"""slice(x, d, None, n, 1) -> slice(x, d, 0, n), and a slice of all of a dim -> x.

Python's `x[:, :n]` comes as one form or the other, and `x[:, :]` as a slice or as none, for a size that is a number
and for one that is open.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.ops.nodes import bound_arguments

aten = torch.ops.aten
_END = 2**63 - 1  # where a slice without an end ends


def plain_slices(module: fx.GraphModule) -> None:
    """Writes every slice in one form, and drops those of a whole dim that only ATen ops read."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)):
        call = bound_arguments(node)
        start = 0 if call["start"] is None else call["start"]
        end = _END if call["end"] is None else call["end"]
        size = call["self"].meta["val"].shape[call["dim"]]
        is_known = isinstance(size, int) and isinstance(end, int)
        is_whole = start == 0 and call["step"] == 1 and (end >= size if is_known else end == _END)
        if is_whole and all(map(_is_aten, node.users)):
            node.replace_all_uses_with(call["self"])
            module.graph.erase_node(node)
            continue
        step = () if call["step"] == 1 else (call["step"],)
        node.args, node.kwargs = (call["self"], call["dim"], start, end, *step), {}
    module.recompile()


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"
