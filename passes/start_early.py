"""Collectives of activations -> a start where the operand is made, and a finish where the result is read.

    y = f(x); g = all_reduce(y); z = h(x); r = g + z   ->   y = f(x); s = start(y); z = h(x); g = finish(s); r = g + z

Only collectives with work in between are split, as those of two branches that run side by side. Where every op reads
what the op before it made, none is, and `decompose_products` is what helps. A result that is read many blocks later,
such as the skip of a U-Net, is converted for its use: converted at once it would lie in memory until then.

Autograd runs the backward of a later call first, so that the order is mirrored: the transposed collective starts with
the backward of the finish, and the backward of the start, behind that of `h`, waits for it. So a call that sends in
backward alone is split as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from autopar.ops.collectives import Collective
from autopar.ops.nodes import is_operator, schema

# Those that the runtime can start without waiting.
STARTED = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
NEAR_BLOCKS = 2  # two branches may be blocks of their own, and what reads both the next


def start_early(module: fx.GraphModule, start: Callable[[Collective], nn.Module], finish: Callable[[Any], Any]) -> None:
    """Splits the collectives between whose operand and first reader something is computed.

    Args:
        module: graph of one rank, changed in place; the submodules `start_0`, ... are added to it.
        start: makes a module that takes the operand of a collective, starts it, and returns what `finish` takes.
        finish: function of a module's top level that waits for the result.
    """
    graph = module.graph
    for number, node in enumerate(splittable(graph)):
        call = Collective.of(node)
        assert call is not None
        name, first = f"start_{number}", _first_user(node, _positions(graph))
        module.add_submodule(name, start(call))
        with graph.inserting_after(_last_leaf(graph) if call.x.op == "placeholder" else call.x):
            started = graph.call_module(name, (call.x,))
        with graph.inserting_before(first):
            finished = graph.call_function(finish, (started,))
        started.meta, finished.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(finished)
        graph.erase_node(node)
    module.recompile()


def splittable(graph: fx.Graph) -> list[fx.Node]:
    """The collectives between whose operand and first reader something is computed, in order."""
    nodes, position = list(graph.nodes), _positions(graph)
    found = []
    for node in nodes:
        call = Collective.of(node)
        if call is not None and can_start(call) and node.users:
            first = _first_user(node, position)
            between = nodes[position[call.x] + 1 : position[first]]
            if any(map(_computes, between)) and _block(first) - _block(call.x) <= NEAR_BLOCKS:
                found.append(node)
    return found


def can_start(call: Collective) -> bool:
    """Whether a collective of an activation, forward or backward, can start without waiting.

    `vary` sends nothing, and its backward adds up the gradients of all ranks. Gradients of parameters have buckets.
    """
    is_activation = call.x.op != "placeholder"
    return call.name in STARTED or (call.name == "vary" and call.backward in STARTED and is_activation)


def _block(node: fx.Node) -> int:
    """The index of a call's block; the first for inputs, and where there are no blocks."""
    block: int = node.meta.get("block", 0)
    return block


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _first_user(node: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    return min(node.users, key=position.__getitem__)


def _last_leaf(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="placeholder")[-1]


def _computes(node: fx.Node) -> bool:
    """Whether a node is an op that writes a new tensor, and no collective."""
    if not is_operator(node) or Collective.of(node) is not None:
        return False
    return all(result.alias_info is None for result in schema(node).returns)
