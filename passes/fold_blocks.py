"""The calls of a block -> one call of a submodule, which can run it again in backward.

    a = f(w0, x); b = g(w1, a); c = h(w2, b)   ->   a = f(w0, x); block_1 = block_1(w1, a); c = h(w2, block_1[0])

A call that depends on no parameter and draws no random numbers (masks, positions) stays outside if several blocks use
it, and runs once. A call that an earlier pass has added (a gather of parameters) belongs to the first block that uses
it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from torch import fx, nn

from autopar.ops.nodes import draws
from autopar.passes.cut_stages import extract


class _Home(NamedTuple):
    """The new place of a call: its block, and whether it goes inside of the block's submodule."""

    block: float
    is_inside: bool


def fold_blocks(
    module: fx.GraphModule,
    folded: Collection[int],
    make: Callable[[fx.GraphModule], nn.Module],
    *,
    parameters: int,
    received: int = 0,
) -> fx.GraphModule:
    """Makes a submodule of every block in `folded`.

    Args:
        module: every call has the index of its block in `meta["block"]`, no smaller than that of any
            call it uses, or was put in by a pass.
        folded: indices of blocks.
        make: gets a graph of the block's calls, and returns the module that is called in their place.
        parameters, received: the first placeholders are parameters, and the last are what an earlier
            stage has made of some.
    """
    homes = _homes(module.graph, frozenset(folded), _free(module.graph, parameters, received))
    return _Folding(module, homes).run(make)


def _free(graph: fx.Graph, parameters: int, received: int) -> set[fx.Node]:
    """The nodes that depend on no parameter and draw no random numbers."""
    placeholders = graph.find_nodes(op="placeholder")
    found = set(placeholders[parameters : len(placeholders) - received])
    for node in graph.nodes:
        if node.op == "call_function" and not draws(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _homes(graph: fx.Graph, folded: frozenset[int], free: Collection[fx.Node]) -> dict[fx.Node, _Home]:
    homes: dict[fx.Node, _Home] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            homes[node] = _Home(math.inf, False)
        elif node.op != "placeholder":
            homes[node] = _home(node, homes, folded, node in free)
    return homes


def _home(node: fx.Node, homes: dict[fx.Node, _Home], folded: frozenset[int], is_free: bool) -> _Home:
    """The new place of a call; a free call goes inside a block if only this block uses it, else before its users.

    The results of a free call stay together: a block takes tensors, and no lists.
    """
    is_one = is_free and node.target is operator.getitem
    together = node.all_input_nodes[0].users if is_one else (node,)
    using = [user for each in together for user in each.users]
    users = {homes[user] for user in using if user in homes}
    block = node.meta.get("block", math.inf)
    if is_free or "block" not in node.meta:
        block = min((user.block for user in users), default=block)
    is_inside = block in folded and (not is_free or (homes.keys() >= {*using} and users == {_Home(block, True)}))
    return _Home(block, is_inside)


class _Folding:
    def __init__(self, module: fx.GraphModule, homes: dict[fx.Node, _Home]) -> None:
        self.module, self.homes = module, homes
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def run(self, make: Callable[[fx.GraphModule], nn.Module]) -> fx.GraphModule:
        nodes = list(self.module.graph.nodes)
        self._copy(n for n in nodes if n.op == "placeholder")
        calls = sorted((n for n in nodes[:-1] if n in self.homes), key=self.homes.__getitem__)
        for home, group in itertools.groupby(calls, self.homes.__getitem__):
            if home.is_inside:
                name = f"block_{home.block}"
                self.module.add_submodule(name, make(self._fold(name, list(group))))
            else:
                self._copy(group)
        self._copy(nodes[-1:])
        return fx.GraphModule(self.module, self.graph)

    def _copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def _fold(self, name: str, calls: list[fx.Node]) -> fx.GraphModule:
        """Calls the block, and returns its graph."""
        own = set(calls)
        inputs = list(dict.fromkeys(n for c in calls for n in c.all_input_nodes if n not in own))
        results = [c for c in calls if not own.issuperset(c.users)]
        call = self.graph.call_module(name, tuple(self.copies[n] for n in inputs))
        for i, node in enumerate(results):
            self.copies[node] = self.graph.call_function(operator.getitem, (call, i))
        return extract(calls, inputs, results, root=self.module)
