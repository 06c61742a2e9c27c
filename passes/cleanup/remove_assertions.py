"""_assert_tensor_metadata(x, ...) -> nothing."""

from __future__ import annotations

from torch import fx


def remove_assertions(module: fx.GraphModule) -> None:
    """Erases assertion nodes, and then nodes that only they used."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
