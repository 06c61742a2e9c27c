"""A backward in two halves: the gradients of a stage's inputs now, those of its weights later.

Zero-bubble schedules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2) send the gradients of the first
half immediately, and run the second half while a stage would wait. The autograd graph has two parts: the *trunk*, whose
nodes lead to an input, and the nodes that lead only to weights. The first half runs the trunk, and keeps the gradients
that arrive at each node with an edge out of the trunk. The second half runs each of these nodes again, by itself, and
the rest of the graph whenever enough gradients for it are ready. Of a product it computes only the gradients that leave
the trunk; any other node computes all of its gradients again.

Autograd could run a single edge, but before it does, it walks all of the graph under that edge's node, so that the time
of a second half would grow with the square of a stage's depth. If several nodes of the trunk reach the same weight, it
would also go through the trunk from the first of them to the others.

torch.distributed.pipelining has a split of its own. If weights meet the trunk in several places (a gather of several
weights, a weight that is used twice), it runs parts of the trunk again, with their collectives. It loses gradients of
weights that reach a result outside of the trunk.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar import _torch

Gradients = tuple[Tensor | None, ...]
Edges = Mapping[int, GradientEdge]  # position of an edge among those of its node -> the edge

_End = tuple[Node, int]  # where an edge ends: a node, and the number of its input

# The second half passes finished gradients on to the weights as soon as they take this many bytes: about one bucket.
_PASSED_ON_BYTES = 32 * 2**20


class SplitBackward:
    """Runs the first half at construction, and the second half when `run_weights` is called.

    Args:
        results: results of a forward; those that need no gradient are ignored.
        gradients: gradient of each result; None stands for a tensor of ones.
        inputs: leaves that the forward took; those that need no gradient are ignored.

    Attributes:
        input_gradients: gradient of each input; None for an input that needs none.
    """

    def __init__(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Any]) -> None:
        roots = [
            (get_gradient_edge(x), torch.ones_like(x) if g is None else g)
            for x, g in zip(results, gradients, strict=True)
            if x.requires_grad
        ]
        leaves = {i: get_gradient_edge(x) for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
        # Under torch 2.11 an edge keeps the node of a Python function alive, the node itself does not.
        self._roots = [edge for edge, _ in roots]
        walked = trunk([edge.node for edge, _ in roots], {edge.node for edge in leaves.values()})
        self._rest = [(edge, g) for edge, g in roots if edge.node not in walked]
        self._leaving = {node: edges for node, edges in walked.items() if edges}
        self._arrived: dict[Node, Gradients] = {}
        trunk_roots = [(edge, g) for edge, g in roots if edge.node in walked]
        found = self._run_trunk(trunk_roots, list(leaves.values()))
        by_position = dict(zip(leaves, found, strict=True))
        self.input_gradients = tuple(by_position.get(i) for i in range(len(inputs)))

    def _run_trunk(
        self, roots: Sequence[tuple[GradientEdge, Tensor]], leaves: Sequence[GradientEdge]
    ) -> Sequence[Tensor | None]:
        if not roots:
            return [None] * len(leaves)
        hooks = [node.register_prehook(self._noting(node)) for node in self._leaving]
        try:
            return torch.autograd.grad(
                [edge for edge, _ in roots], leaves, [g for _, g in roots], retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, node: Node) -> Any:
        def note(gradients: Gradients) -> None:
            self._arrived[node] = gradients

        return note

    def run_weights(self) -> None:
        """The second half: gradients accumulate in the weights, whose hooks are called."""
        beside = [edge for edge, _ in self._rest]
        passed = _PassedOn([beside, *(edges.values() for edges in self._leaving.values())])
        passed.add(self._rest)
        # In the order of the first half, so that sums are always rounded alike.
        for node in list(self._arrived):
            passed.add(self._left(node))
        passed.end()
        self._rest, self._leaving, self._roots = [], {}, []

    def _left(self, node: Node) -> Sequence[tuple[GradientEdge, Tensor]]:
        """The gradients that a node of the trunk passes to its edges out of the trunk."""
        gradients, leaving = self._arrived.pop(node), self._leaving[node]
        first = gradients[0] if len(gradients) == 1 else None
        if first is not None and (found := _torch.operand_gradients(node, first, leaving)):
            return found
        if all(g is None for g in gradients):
            return []
        edges = set(leaving.values())
        return [pair for pair in _torch.run_node(node, gradients) if pair[0] in edges]


class _PassedOn:
    """Gradients on their way from the trunk to the weights.

    Nodes outside of the trunk that are connected run together, once all gradients for them are there: a gather of
    several weights waits for the last of these. Parts that have all their gradients run as soon as these take
    `_PASSED_ON_BYTES`, so that the gradients of all weights of a stage do not exist at the same time.

    Args:
        groups: edges out of the trunk that get their gradients together: those of one node of the trunk.
    """

    def __init__(self, groups: Iterable[Iterable[GradientEdge]]) -> None:
        # Node outside of the trunk -> number of its connected part.
        self._part_of: dict[Node, int] = {}
        # Number of a part -> number of the part that it belongs to by now.
        self._joined: list[int] = []
        # Number of a part -> groups of edges that have no gradients yet.
        self._missing = Counter[int]()
        starts = [self._part(group) for group in groups]
        self._missing.update(map(self._find, starts))
        self._sums: dict[int, dict[_End, Tensor]] = {}
        self._ready: dict[_End, Tensor] = {}
        self._ready_bytes = 0

    def _part(self, edges: Iterable[GradientEdge]) -> int:
        """The part with the nodes under these edges, to which all parts are joined that have one of them."""
        own = len(self._joined)
        self._joined.append(own)
        waiting = [edge.node for edge in edges]
        while waiting:
            node = waiting.pop()
            if node in self._part_of:
                self._joined[self._find(self._part_of[node])] = own
            else:
                self._part_of[node] = own
                waiting += [n for n, _ in node.next_functions if n is not None]
        return own

    def _find(self, part: int) -> int:
        while self._joined[part] != part:
            # This halves the way for the next time.
            part = self._joined[part] = self._joined[self._joined[part]]
        return part

    def add(self, pairs: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """Adds the gradients of one group of edges, and passes on what is ready."""
        if not pairs:
            return
        part = self._find(self._part_of[pairs[0][0].node])
        sums = self._sums.setdefault(part, {})
        for edge, gradient in pairs:
            end = edge.node, edge.output_nr
            sums[end] = sums[end] + gradient if end in sums else gradient
        self._missing[part] -= 1
        if not self._missing[part]:
            self._ready |= self._sums.pop(part)
            self._ready_bytes += sum(map(_dense_bytes, sums.values()))
            if self._ready_bytes >= _PASSED_ON_BYTES:
                self._pass_on()

    def end(self) -> None:
        """Passes on all gradients that are there."""
        for sums in self._sums.values():
            self._ready |= sums
        self._sums = {}
        self._pass_on()

    def _pass_on(self) -> None:
        ready, self._ready, self._ready_bytes = self._ready, {}, 0
        if ready:
            torch.autograd.backward(list(itertools.starmap(GradientEdge, ready)), list(ready.values()))


def _dense_bytes(gradient: Tensor) -> int:
    """Bytes of a gradient; of a sparse one, which does not tell its own, those of a dense one of its shape."""
    return gradient.numel() * gradient.element_size()


class WholeBackward:
    """Runs both halves of a backward together, because a recomputed block would be recomputed for each part of a half.

    The arguments and attributes are those of `SplitBackward`; gradients of weights have accumulated.
    """

    def __init__(self, results: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Any]) -> None:
        leaves = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        for x in itertools.compress(inputs, leaves):
            x.grad = None  # of the step before
        roots = [(x, g) for x, g in zip(results, gradients, strict=True) if x.requires_grad]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        self.input_gradients = tuple(x.grad if is_leaf else None for x, is_leaf in zip(inputs, leaves, strict=True))

    def run_weights(self) -> None:
        """Does nothing, because the gradients of the weights are already there."""


def trunk(roots: Sequence[Node], ends: set[Node]) -> dict[Node, Edges]:
    """The nodes from which one of `ends` is reached, `ends` included, each with its edges to nodes that are not."""
    following: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    found = set(ends)
    waiting = [(node, False) for node in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            if any(n in found for n, _ in following[node]):
                found.add(node)
        elif node not in following:
            following[node] = node.next_functions
            waiting.append((node, True))
            waiting += [(n, False) for n, _ in following[node] if n is not None and n not in following]
    return {node: _leaving(following.get(node, ()), found) for node in found}


def _leaving(following: Iterable[tuple[Node | None, int]], found: set[Node]) -> Edges:
    return {i: GradientEdge(n, number) for i, (n, number) in enumerate(following) if n is not None and n not in found}
