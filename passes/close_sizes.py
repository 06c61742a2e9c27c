"""reshape(x, [s0, 4 * s1]) -> reshape(x, [16, 384]): a graph with open sizes, for one batch of given shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar._torch import SYMBOLIC, OpOverload, OtherSizes, SizeValues
from autopar.passes.cleanup.name_nodes import name_nodes
from autopar.passes.cleanup.plain_slices import plain_slices
from autopar.passes.cleanup.reshape_views import reshape_views


def close_sizes(module: fx.GraphModule, inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> fx.GraphModule:
    """A copy of a graph in which every open size, and every number computed of some, is the number that it is here.

    Args:
        module: the graph, which stays as it is.
        inputs: names of the placeholders with open sizes, and of all other inputs.
        shapes: the shape of each of these inputs.

    Raises OtherSizes where the graph is not that of these shapes.
    """
    given = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    values = SizeValues([given[name].meta["val"] for name in inputs], shapes)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}

    def closed(argument: Any) -> Any:
        return copies[argument] if isinstance(argument, fx.Node) else values.number(argument)

    for node in module.graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), closed)
        if node.op == "call_function" and isinstance(node.meta.get("val"), SYMBOLIC):
            copies[node] = _computed(node, args, values)
            continue
        _refuse_own_graph(node)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        copies[node].meta = dict(node.meta)
        if "val" in node.meta:
            copies[node].meta["val"] = values.examples(node.meta["val"])
    found = fx.GraphModule(module, graph)
    plain_slices(found)  # one that takes all of a dim is seen now
    reshape_views(found)  # the size that -1 stands for is known now
    name_nodes(found)
    return found


def _computed(node: fx.Node, args: Any, values: SizeValues) -> int | float | bool:
    """The number that a node computes of sizes, by Python's own arithmetic where it can be."""
    if node.kwargs or any(isinstance(x, fx.Node) for x in args):
        found: int | float | bool = values.number(node.meta["val"])
        return found
    return node.target(*args)  # type: ignore[operator]


def _refuse_own_graph(node: fx.Node) -> None:
    """Raises OtherSizes for a call whose target is not an operator, but holds sizes of its own: experts, functions."""
    is_plain = isinstance(node.target, OpOverload) or node.target is operator.getitem
    if node.op == "get_attr" or (node.op == "call_function" and not is_plain):
        raise OtherSizes(f"{node.name} has a graph of its own, whose sizes are fixed")
