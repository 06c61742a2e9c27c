"""clone(x) -> x, alias(x) -> x: nothing is changed in place, so that a copy is only its strides."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def remove_clones(module: fx.GraphModule) -> None:
    """Drops copies that only ATen ops read: those take any strides, once views are reshapes.

    Kernels choose strides by device (attention's differ between CPU and meta), and so whether a reshape
    must copy; without the copies, a model is the same graph wherever it is captured.
    """
    for node in list(module.graph.nodes):
        if node.target in (aten.clone.default, aten.alias.default) and all(
            map(_is_aten, node.users)
        ):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
