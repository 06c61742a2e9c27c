"""Invariants of a graph, checked between passes. A failure shows the node and its neighbourhood.

1. Every argument is defined before it is used, and belongs to this graph.
2. There is one output node, and it stands last.
3. Nothing is changed in place: every op is functional.
4. A collective has the dims its kind needs, a size of at least 2, and the transposed op as backward.
5. A ring goes along some of the axes that split its queries, each of at least 2 ranks.
"""

from __future__ import annotations

from torch import fx

from autopar.errors import VerifierError
from autopar.ir.conversion import TRANSITIONS
from autopar.ops.collectives import Collective
from autopar.ops.exchange import EXCHANGES
from autopar.ops.nodes import is_operator, schema
from autopar.ops.ring import Ring

DIMS = {
    "vary": 0,
    "partial": 0,
    "all_reduce": 0,
    "all_to_all": 2,
    **dict.fromkeys(EXCHANGES, 0),
    "scatter": 2,
    "gather": 2,
    "send": 2,
}  # the others have one


def verify_graph(module: fx.GraphModule, *, after: str) -> None:
    """Raises VerifierError naming the broken invariant, the node, and the pass it was found after."""
    seen: set[fx.Node] = set()
    nodes = list(module.graph.nodes)
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise _broken(node, f"its argument {argument} is not defined before it", after)
        seen.add(node)
        _verify_node(node, after)
    if [n.op for n in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise _broken(nodes[-1], "there must be one output node, and it stands last", after)


def _verify_node(node: fx.Node, after: str) -> None:
    if is_operator(node) and schema(node).is_mutable:
        raise _broken(node, "an op must not change its arguments", after)
    if call := Collective.of(node):
        _verify_collective(node, call, after)
    if ring := Ring.of(node):
        _verify_ring(node, ring, after)


def _verify_collective(node: fx.Node, call: Collective, after: str) -> None:
    name, dims, size, backward = call.name, call.dims, call.size, call.backward
    if len(dims) != DIMS.get(name, 1):
        raise _broken(node, f"{name} takes {DIMS.get(name, 1)} dims, not {list(dims)}", after)
    if not isinstance(size, int) or size < 2:
        raise _broken(node, f"a collective over {size} ranks", after)
    pairs = {(t.forward, t.backward) for t in TRANSITIONS.values()}
    if (name, backward) not in (*pairs, EXCHANGES, EXCHANGES[::-1]):
        raise _broken(node, f"{backward} is not the transpose of any {name}", after)


def _verify_ring(node: fx.Node, ring: Ring, after: str) -> None:
    axes = range(len(ring.groups))
    if len(ring.sizes) != len(axes) or not all(i in axes for i in ring.turns) or not ring.turns:
        raise _broken(node, f"a ring along the axes {ring.turns} of {list(ring.groups)}", after)
    if any(size < 2 for size in ring.sizes):
        raise _broken(node, f"a ring over {list(ring.sizes)} ranks", after)


def _broken(node: fx.Node, invariant: str, after: str) -> VerifierError:
    near = [*node.all_input_nodes, node, *node.users]
    lines = "\n".join(f"  {'->' if n is node else '  '} {n.format_node()}" for n in near)
    return VerifierError(f"After {after}, node {node.name}: {invariant}.\n{lines}")
