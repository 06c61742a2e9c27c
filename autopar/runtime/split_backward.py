"""A backward in two halves: the gradients of a stage's inputs now, those of its weights later.

Zero-bubble schedules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2) send the gradients of the first
half immediately, and run the second half while a stage would wait. The autograd graph has two parts: the *trunk*, whose
nodes lead to an input, and the nodes that lead only to weights. The first half runs the trunk, and keeps the gradients
that arrive at each node with an edge out of the trunk. The second half runs each of these nodes again for those edges
alone, and then the rest of the graph, in one pass.

If an edge leads to a node that several nodes of the trunk reach, autograd cannot run that edge alone: from the first of
these nodes it would go through the trunk to the others. Such a node is called directly.

torch.distributed.pipelining has a split of its own. If weights meet the trunk in several places (a gather of several
weights, a weight that is used twice), it runs parts of the trunk again, with their collectives. It loses gradients of
weights that reach a result outside of the trunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar import _torch

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """Runs the first half at construction, and the second half when `run_weights` is called.

    Args:
        results: results of a forward; those that need no gradient are ignored.
        gradients: gradient of each result; None stands for a tensor of ones.
        inputs: leaves that the forward took; those that need no gradient are ignored.

    Attributes:
        input_gradients: gradient of each input; None for an input that needs none.
    """

    def __init__(
        self,
        results: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Any],
    ) -> None:
        roots = [
            (get_gradient_edge(x), torch.ones_like(x) if g is None else g)
            for x, g in zip(results, gradients, strict=True)
            if x.requires_grad
        ]
        leaves = {
            i: get_gradient_edge(x)
            for i, x in enumerate(inputs)
            if isinstance(x, Tensor) and x.requires_grad
        }
        ends = {edge.node for edge in leaves.values()}
        # Under torch 2.11 an edge keeps the node of a Python function alive, the node itself does not.
        self._roots = [edge for edge, _ in roots]
        self._trunk, self._met_again = trunk([edge.node for edge, _ in roots], ends)
        self._rest = [(edge, g) for edge, g in roots if edge.node not in self._trunk]
        self._arrived: dict[Node, Gradients] = {}
        trunk_roots = [(edge, g) for edge, g in roots if edge.node in self._trunk]
        found = self._run_trunk(trunk_roots, list(leaves.values()), ends)
        by_position = dict(zip(leaves, found, strict=True))
        self.input_gradients = tuple(by_position.get(i) for i in range(len(inputs)))

    def _run_trunk(
        self,
        roots: Sequence[tuple[GradientEdge, Tensor]],
        leaves: Sequence[GradientEdge],
        ends: set[Node],
    ) -> Sequence[Tensor | None]:
        if not roots:
            return [None] * len(leaves)
        hooks = [
            node.register_prehook(self._noting(node))
            for node in self._trunk
            if node not in ends and any(True for _ in self._leaving(node))
        ]
        try:
            return torch.autograd.grad(
                [edge for edge, _ in roots], leaves, [g for _, g in roots],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, node: Node) -> Any:
        def note(gradients: Gradients) -> None:
            self._arrived[node] = gradients

        return note

    def _leaving(self, node: Node) -> Iterator[GradientEdge]:
        """The edges of a node of the trunk that lead only to weights."""
        for following, number in node.next_functions:
            if following is not None and following not in self._trunk:
                yield GradientEdge(following, number)

    def run_weights(self) -> None:
        """The second half: gradients accumulate in the weights, whose hooks are called."""
        sums: dict[tuple[Node, int], Tensor] = {}
        edges = [pair for node in self._arrived for pair in self._left(node)]
        for edge, gradient in (*self._rest, *edges):
            key = (edge.node, edge.output_nr)
            sums[key] = sums[key] + gradient if key in sums else gradient
        self._arrived, self._rest, self._trunk = {}, [], set()
        if sums:
            torch.autograd.backward([GradientEdge(*key) for key in sums], list(sums.values()))
        self._roots = []

    def _left(self, node: Node) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients that a node of the trunk passes to its edges out of the trunk."""
        arrived = [(i, g) for i, g in enumerate(self._arrived[node]) if g is not None]
        edges = list(dict.fromkeys(self._leaving(node)))
        if not arrived:
            return []
        if any(edge.node in self._met_again for edge in edges):
            given = _torch.run_node(node, self._arrived[node])
            return [(edge, g) for edge, g in given if edge.node not in self._trunk]
        found = torch.autograd.grad(
            [GradientEdge(node, i) for i, _ in arrived], edges, [g for _, g in arrived],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        return [(edge, g) for edge, g in zip(edges, found, strict=True) if g is not None]


class WholeBackward:
    """Runs both halves of a backward together, because a recomputed block would be recomputed for each part of a half.

    The arguments and attributes are those of `SplitBackward`; gradients of weights have accumulated.
    """

    def __init__(
        self,
        results: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Any],
    ) -> None:
        leaves = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        for x in itertools.compress(inputs, leaves):
            x.grad = None  # of the step before
        roots = [(x, g) for x, g in zip(results, gradients, strict=True) if x.requires_grad]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        self.input_gradients = tuple(
            x.grad if is_leaf else None for x, is_leaf in zip(inputs, leaves, strict=True)
        )

    def run_weights(self) -> None:
        """Does nothing, because the gradients of the weights are already there."""


def trunk(roots: Sequence[Node], ends: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes from which one of `ends` is reached, `ends` included; and the nodes to which several edges lead."""
    found, seen, met, met_again = set(ends), set[Node](), set[Node](), set[Node]()
    waiting = [(node, False) for node in roots]
    while waiting:
        node, is_done = waiting.pop()
        following = [n for n, _ in node.next_functions if n is not None]
        if is_done:
            if any(n in found for n in following):
                found.add(node)
        elif node not in seen:
            seen.add(node)
            for n in following:
                (met_again if n in met else met).add(n)
            waiting.append((node, True))
            waiting += [(n, False) for n in following if n not in seen]
    return found, met_again
