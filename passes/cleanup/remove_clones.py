"""clone(x) -> x, alias(x) -> x: the graph changes nothing in place, so that a copy only changes strides."""

from __future__ import annotations

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.ops.nodes import schema

aten = torch.ops.aten


def remove_clones(module: fx.GraphModule) -> None:
    """Drops copies that only ATen ops read: those take any strides, once views are reshapes.

    Kernels choose strides by device (attention's differ between CPU and meta), and so whether a reshape
    must copy; without the copies, a model is the same graph wherever it is captured. A copy of what the graph is
    given stays: its owner may change it (a queue, a running mean) between forward and backward.
    """
    for node in list(module.graph.nodes):
        if (
            node.target in (aten.clone.default, aten.alias.default)
            and all(map(_is_aten, node.users))
            and not (node.target is aten.clone.default and _is_given(node.args[0]))
        ):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _is_given(node: fx.Node) -> bool:
    """Whether a tensor lies in the memory of an argument of the graph."""
    while node.op != "placeholder":
        if not _is_aten(node) or not (_is_view(node) or node.target is aten.reshape.default):
            return False
        node = node.all_input_nodes[0]
    return True


def _is_view(node: fx.Node) -> bool:
    return any(r.alias_info is not None for r in schema(node).returns)
