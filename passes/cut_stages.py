"""The local graph of a whole model -> one graph for every pipeline stage.

A stage is a run of nodes. What a later stage uses of it is carried, as the local tensor it is, through
every stage between: sending is the identity on the local tensors of ranks with equal coordinates, so the
cut is right for every layout, and its backward sends the gradient the other way.

    a = f(w0, x)                  stage 0: a = f(w0, x)          -> a
    b = g(w1, a)                  stage 1: a; b = g(w1, a)       -> a, b
    c = h(w2, a, b)               stage 2: a, b; c = h(w2, a, b) -> c

Nodes that depend on no parameter (masks, positions, targets) are computed again on every stage that uses them. So are
nodes that depend on a single parameter and nothing else, and the parameter lies on every such stage.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ops.nodes import draws, reached


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage: `module(*leaves, *received)` returns `(*outputs, *sent)`.

    Attributes:
        leaves: names of the whole graph's placeholders that the stage uses, in order.
        received: values that the previous stage sends.
        outputs: positions, among the outputs of the whole graph, of the outputs that the stage returns.
        sent: values that the stage sends to the next one.
    """

    module: fx.GraphModule
    leaves: tuple[str, ...]
    received: tuple[fx.Node, ...]
    outputs: tuple[int, ...]
    sent: tuple[fx.Node, ...]


def cut_stage_graphs(
    module: fx.GraphModule,
    stage_of: Mapping[fx.Node, int],
    count: int,
    *,
    kept: Iterable[str],
    weights: Iterable[str] = (),
    early_outputs: Collection[int],
) -> tuple[StageGraph, ...]:
    """Cuts a graph into `count` stages.

    Args:
        module: the graph of one rank.
        stage_of: stage of every call; no smaller than that of any call it uses.
        count: number of stages.
        kept: placeholders on which nothing may depend that is computed twice: parameters, and buffers
            that a stage changes.
        weights: those of `kept` that are parameters. What is made of one of them alone (gathered, cast,
            transposed) is recomputed where it is used.
        early_outputs: positions of the outputs that are returned by the stage that makes them; the others leave the
            last stage.
    """
    kept, weights = frozenset(kept), frozenset(weights)
    return _Cut(module, stage_of, count, kept, weights, early_outputs).run()


class _Cut:
    def __init__(
        self,
        module: fx.GraphModule,
        stage_of: Mapping[fx.Node, int],
        count: int,
        kept: frozenset[str],
        weights: frozenset[str],
        early_outputs: Collection[int],
    ) -> None:
        self.nodes = list(module.graph.nodes)
        self.numbers, self.count = stage_of, count
        self.results: list[fx.Node] = list(self.nodes[-1].args[0])
        self.early = early_outputs
        self.copied = self._copied(kept) | self._of_one_weight(weights)

    def _copied(self, kept: frozenset[str]) -> set[fx.Node]:
        """The nodes that every stage can compute by itself: they depend on nothing in `kept`, and draw no numbers."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                free = node.name not in kept
            else:
                free = not draws(node) and all(n in found for n in node.all_input_nodes)
            if free:
                found.add(node)
        return found

    def _of_one_weight(self, weights: frozenset[str]) -> set[fx.Node]:
        """The calls that depend on one weight and nothing else."""
        found = {n for n in self.nodes if n.op == "placeholder" and n.name in weights}
        for node in self.nodes:
            sources = node.all_input_nodes
            if node.op == "call_function" and len(sources) == 1 and sources[0] in found:
                found.update([] if draws(node) else [node])
        return {n for n in found if n.op == "call_function"}

    def run(self) -> tuple[StageGraph, ...]:
        last = self._last_uses()
        live = [
            tuple(n for n, end in last.items() if self.numbers[n] < stage <= end) for stage in range(self.count + 1)
        ]
        return tuple(self._stage(s, live[s], live[s + 1]) for s in range(self.count))

    def _last_uses(self) -> dict[fx.Node, int]:
        """Calls that are not copied -> the last stage that uses them, in the graph's order."""
        last: dict[fx.Node, int] = {
            n: self.numbers[n] for n in self.nodes if n.op == "call_function" and n not in self.copied
        }
        for node in self.nodes[:-1]:
            if node in last:
                for argument in node.all_input_nodes:
                    if argument in last:
                        last[argument] = max(last[argument], self.numbers[node])
        for i, node in enumerate(self.results):
            if i not in self.early and node in last:
                last[node] = self.count - 1
        return last

    def _stage(self, stage: int, received: tuple[fx.Node, ...], sent: tuple[fx.Node, ...]) -> StageGraph:
        outputs = tuple(
            i
            for i, node in enumerate(self.results)
            if stage == (self._home(node) if i in self.early else self.count - 1)
        )
        results = [*(self.results[i] for i in outputs), *sent]
        needed = self._needed([*self._own(stage), *results], set(received))
        nodes = [n for n in self.nodes if n in needed]
        leaves = [n for n in nodes if n.op == "placeholder"]
        calls = [n for n in nodes if n.op != "placeholder"]
        module = extract(calls, [*leaves, *received], results)
        return StageGraph(module, tuple(n.name for n in leaves), received, outputs, sent)

    def _home(self, node: fx.Node) -> int:
        """The stage that returns an early output: the one that computes it; the first, if every stage can."""
        return 0 if node in self.copied else self.numbers[node]

    def _own(self, stage: int) -> list[fx.Node]:
        return [n for n in self.nodes if n.op == "call_function" and n not in self.copied and self.numbers[n] == stage]

    @staticmethod
    def _needed(roots: Iterable[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
        """The roots and all nodes on which they depend, without `given` nodes and those behind them."""
        return reached({*roots} - given, lambda node: {*node.all_input_nodes} - given)


def stage_numbers(module: fx.GraphModule, places: Mapping[str, int], begins: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of every call: the stage of the captured op for which it was added."""
    numbers: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        origin = node.meta["origin"]
        if origin:
            numbers[node] = bisect.bisect_right(begins, places[origin])
        else:
            numbers[node] = max((numbers.get(n, 0) for n in node.all_input_nodes), default=0)
    return numbers


def extract(
    calls: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    *,
    root: torch.nn.Module | None = None,
) -> fx.GraphModule:
    """A graph of these calls: a function of `inputs` that returns `results` as a tuple.

    `root` has the submodules that they call.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        # what ranks run alone is the call that makes it, on another stage
        copies[node].meta = {key: value for key, value in node.meta.items() if key != "alone"}
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in results))
    return fx.GraphModule(root or torch.nn.Module(), graph)
