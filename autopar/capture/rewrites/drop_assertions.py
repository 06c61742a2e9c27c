"""x.item() -> nothing, where assertions alone read the number."""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.checks import is_read

aten = torch.ops.aten


def drop_assertions(module: fx.GraphModule) -> None:
    """Erases numbers that assertions alone read, and these assertions: torch 2.11 does not decompose those of bools."""
    for number in module.graph.find_nodes(op="call_function", target=aten.item.default):
        if not is_read(number):
            _erase(number)
    module.recompile()


def _erase(node: fx.Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
