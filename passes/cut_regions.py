"""Runs of plain ops -> calls of submodules, which can be compiled; calls that cannot be compiled stay outside.

    k = randint(); a = f(w0, x); g = gather(w1); b = h(g, a, k)
                ->   k = randint(); a = region_0(w0, x)[0]; g = gather(w1); b = region_1(g, a, k)[0]

A region ends where a Python object is called (a gather of parameters, a block that is recomputed, a sum that
is waited for), where a block ends, so that gradients come back block by block and equal blocks become equal
regions, and between calls that backward recomputes and others. Where nobody waits for the gradients of a block,
blocks that follow each other share a region of at most `joined_ops` ops. An op that draws stays outside: the numbers
it takes from the generator are then those it would take uncompiled, in the same order. It moves up before
the region that it would cut in two, unless it takes something from that. Outside stay too the calls of a mixture
of experts whose rows change hands: how many rows they have is another number in every run.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from autopar.ops.nodes import draws, is_operator

Make = Callable[[fx.GraphModule], torch.nn.Module]


class _BlockPart(NamedTuple):
    """The block of a call, and whether backward recomputes the call."""

    block: int | None
    is_recomputed: bool


_NOWHERE = _BlockPart(None, False)  # before the first call of a block


def cut_regions(module: fx.GraphModule, make: Make, *, joined_ops: int = 0) -> fx.GraphModule:
    """A graph in which every region of at least two calls is a call of one submodule.

    A region is a run of plain ops of one block, or of several (see the top of this file).

    Args:
        module: the graph; the submodules are added to it as well. A call may have the index of its block
            in `meta["block"]`, and in `meta["recomputed"]` whether backward recomputes it.
        make: function that takes the graph of a region (its inputs -> the tuple of its results) and returns
            the submodule. Equal regions have identical code.
        joined_ops: largest number of ops of a region of several blocks; 0 makes a region of every block.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    numbers = itertools.count()
    for group in _groups(list(module.graph.nodes), joined_ops):
        if len(group) > 1:
            name = f"region_{next(numbers)}"
            inputs, results = _edges(group)
            module.add_submodule(name, make(_extract(group, inputs, results)))
            call = graph.call_module(name, tuple(copies[n] for n in inputs))
            call.meta["recomputed"] = group[0].meta.get("recomputed", False)
            for i, node in enumerate(results):
                copies[node] = graph.call_function(operator.getitem, (call, i))
                copies[node].meta = dict(node.meta)
        else:
            for node in group:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _groups(nodes: Sequence[fx.Node], joined_ops: int) -> Iterator[list[fx.Node]]:
    """The regions, and between them single nodes that belong to no region."""
    places = _places(nodes)
    sizes = Counter(places[node] for node in nodes if _is_plain(node))
    region: dict[fx.Node, None] = {}
    block: _BlockPart = _NOWHERE
    for node in nodes:
        uses_region = any(n in region for n in node.all_input_nodes)
        # One of several results belongs where they are made.
        joins = _is_plain(node) and (uses_region or node.target is not operator.getitem)
        ends = uses_region or not _moves_up(node)
        if joins:
            room = joined_ops - len(region)
            ends = block != places[node] and not _fits(block, places[node], sizes, room)
        if region and ends:
            yield list(region)
            region = {}
        if joins:
            region[node], block = None, places[node]
        else:
            yield [node]


def _fits(block: _BlockPart, following: _BlockPart, sizes: Mapping[_BlockPart, int], room: int) -> bool:
    """Whether a block may go on with the region of the block before it, to which this many ops may be added."""
    return not (block.is_recomputed or following.is_recomputed) and sizes[following] <= room


def _places(nodes: Sequence[fx.Node]) -> dict[fx.Node, _BlockPart]:
    """The place of every node. A node without a block takes that of the plain node before it."""
    found: dict[fx.Node, _BlockPart] = {}
    latest = _NOWHERE
    for node in nodes:
        if "block" in node.meta:
            found[node] = _BlockPart(node.meta["block"], node.meta.get("recomputed", False))
        else:
            found[node] = latest
        latest = found[node] if _is_plain(node) else latest
    return found


def _is_plain(node: fx.Node) -> bool:
    is_op = is_operator(node) or node.target is operator.getitem
    is_sized = not node.meta.get("sized_by_values", False)
    return node.op == "call_function" and is_op and is_sized and not draws(node)


def _moves_up(node: fx.Node) -> bool:
    return draws(node) or node.target is operator.getitem


def _edges(region: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that a region uses, in the order of their use, and its nodes that others use."""
    own = set(region)
    entering = dict.fromkeys(n for c in region for n in c.all_input_nodes if n not in own)
    return list(entering), [c for c in region if not own.issuperset(c.users)]


def _extract(region: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph of a region, with names that do not depend on its place, so that equal regions have equal code."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(f"x{len(copies)}")
    for node in region:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"x{len(copies)}")
    graph.output(tuple(copies[n] for n in results))
    return fx.GraphModule(torch.nn.Module(), graph)
