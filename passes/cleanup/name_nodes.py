"""%_unsafe_view_3 = reshape(...) -> %reshape_7 = reshape(...): names that follow from the graph alone."""

from __future__ import annotations

from torch import fx


def name_nodes(module: fx.GraphModule) -> None:
    """Names every call for its op, in order; a plan speaks of ops by these names."""
    module.graph = named(module.graph)


def named(unnamed: fx.Graph) -> fx.Graph:
    """A copy of a graph in which every call is named for its op, in order."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in unnamed.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        packet = getattr(node.target, "overloadpacket", node.target)
        name = getattr(packet, "__name__", "call") if node.op == "call_function" else node.name
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=name)
        copies[node].meta = dict(node.meta)
    return graph
