"""Finds the numbers of a captured step that count the rows of its batch.

A capture has the lengths of its batch built in. A step is therefore captured at two sizes, for the batch and for a
micro-batch, and the two are compared:

    batch of 6 rows            sum = aten.sum(x)      div = aten.div(sum, 6)
    micro-batch of 3 rows      sum = aten.sum(x)      div = aten.div(sum, 3)

A number in which they differ counts rows. A number in which they agree does not, whatever its value: a model of 6
steps has the same 6 in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.captured import Captured
from autopar.ops.nodes import is_operator, named_arguments, tensor_results

SIZES = ("size", "shape")  # arguments that say the shape of a result, and nothing else
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default)
_EXPAND = torch.ops.aten.expand.default
_ROUNDING = 1e-9  # relative: 1 / 6 and 1 / 3 are rounded


class RowCounts:
    """Compares a step captured for a batch with the same step captured for a micro-batch of it.

    Args:
        batch: the step at the size of the batch.
        part: the step at the size of a micro-batch; the batch itself where no other size is known.

    Attributes:
        is_alike: whether both run the same ops in the same order on the same operands.
        ratio: rows of the batch for each row of the micro-batch: the number of micro-batches where all have as many.
    """

    def __init__(self, batch: Captured, part: Captured) -> None:
        self._batch, self._part = batch, part
        self._nodes, self.is_alike = _paired(batch.module.graph, part.module.graph)
        self._originals = {n.name: _original(n).name for n in batch.module.graph.nodes}
        # The first of several: those behind it are expansions of it.
        self._names = {node.name: name for name, node in reversed(self._nodes.items())}
        self.ratio = self._ratio()

    def node(self, name: str) -> fx.Node:
        """The node of the micro-batch that corresponds to a node of the batch, or to the node that it copies."""
        return self._nodes[self._originals[name]]

    def name(self, node: fx.Node) -> str:
        """The name in the batch of a node of the micro-batch, or of the node that it copies."""
        return self._names[_original(node).name]

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """The shapes of a node's results over a micro-batch."""
        return [tuple(x.shape) for x in tensor_results(self.node(name))]

    def changed(self, node: fx.Node) -> dict[str, tuple[Any, Any]]:
        """The arguments of a call that differ in a micro-batch: name -> value in the batch and in the micro-batch."""
        if _copies(node) or self._nodes[node.name].target != node.target is _EXPAND:
            return {}
        return dict(_changed(node, self._nodes[node.name]))

    def power(self, batch: Any, part: Any) -> int | None:
        """The whole k with `batch = part / ratio**k`, for two numbers; None if there is none."""
        if batch == part:
            return 0
        numbers = (int, float)
        if not isinstance(batch, numbers) or not isinstance(part, numbers) or batch * part <= 0:
            return None
        if self.ratio == 1:
            return None
        k = round(math.log(part / batch) / math.log(self.ratio))
        is_exact = math.isclose(batch * float(self.ratio) ** k, part, rel_tol=_ROUNDING)
        return k if is_exact else None

    def constant_powers(self) -> Iterator[tuple[str, int | None]]:
        """Yields for every constant of the batch the k of its elements, and None where it has none."""
        for name, whole in self._batch.constants.items():
            if name in self._nodes:
                yield name, self._constant_power(whole, self._part.constants[name])

    def _constant_power(self, whole: Tensor, part: Tensor) -> int | None:
        if whole is part:
            return 0
        if whole.shape != part.shape or whole.dtype != part.dtype or whole.is_meta or part.is_meta:
            return None
        a, b = whole.detach().cpu(), part.detach().cpu()
        if torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()):
            return 0
        powers = {self.power(x, y) for x, y in zip(_numbers(a), _numbers(b), strict=True)}
        return powers.pop() if len(powers) == 1 else None

    def _ratio(self) -> Fraction:
        inputs = [name for name in self._batch.inputs if name in self._nodes]
        pairs = [(_rows(self._batch, name), self.shapes(name)[0]) for name in inputs]
        return max((Fraction(rows, own[0]) for rows, own in pairs if own and own[0]), default=Fraction(1))


def _rows(captured: Captured, name: str) -> int:
    (node,) = (n for n in captured.module.graph.find_nodes(op="placeholder") if n.name == name)
    return int(next(iter(node.meta["val"].shape), 1))


def _numbers(x: Tensor) -> list[Any]:
    found: list[Any] = x.reshape(-1).tolist()
    return found


def _paired(batch: fx.Graph, part: fx.Graph) -> tuple[dict[str, fx.Node], bool]:
    """The node of `part` for every node of `batch`, and whether all of them are alike.

    Copies are skipped, because strides decide whether there is one, and a single row has other strides. An expansion
    that a single row does not need is skipped, too.
    """
    nodes: dict[str, fx.Node] = {}
    waiting = [n for n in part.nodes if not _copies(n)]
    for a in (n for n in batch.nodes if not _copies(n)):
        operands = [nodes[x.name] for x in _operands(a)]
        b = waiting[0] if waiting else None
        if b is not None and a.op == b.op and _same_target(a, b) and operands == _operands(b):
            nodes[a.name] = waiting.pop(0)
        elif a.target is _EXPAND:
            nodes[a.name] = operands[0]
        else:
            return nodes, False
    return nodes, not waiting


def _copies(node: fx.Node) -> bool:
    return node.target in _COPIES


def _original(node: fx.Node) -> fx.Node:
    """The node itself; for a copy, the copied node."""
    while _copies(node):
        node = node.all_input_nodes[0]
    return node


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, copies replaced by the copied nodes, in order, with repetition."""
    found: list[fx.Node] = []

    def visit(operand: fx.Node) -> fx.Node:
        found.append(_original(operand))
        return operand

    fx.map_arg((node.args, node.kwargs), visit)
    return found


def _same_target(a: fx.Node, b: fx.Node) -> bool:
    if a.op == "placeholder":
        return a.name == b.name
    bodies = getattr(a.target, "body", None), getattr(b.target, "body", None)
    if isinstance(bodies[0], fx.GraphModule) and isinstance(bodies[1], fx.GraphModule):
        nodes, is_alike = _paired(bodies[0].graph, bodies[1].graph)
        calls = (n for n in bodies[0].graph.nodes if n.op == "call_function" and not _copies(n))
        pairs = ((n, nodes[n.name]) for n in calls)
        return is_alike and all(name in SIZES for x, y in pairs for name, _ in _changed(x, y))
    return str(a.target) == str(b.target)


def _changed(a: fx.Node, b: fx.Node) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if repr(a.target) != repr(b.target) and not hasattr(a.target, "body"):
        yield "arguments", (a.target, b.target)  # arguments that a custom function has built in
    own, others = _arguments(a), _arguments(b)
    for name in {**own, **others}:
        x, y = own.get(name), others.get(name)
        if repr(_without_nodes(x)) != repr(_without_nodes(y)):
            yield name, (x, y)


def _arguments(node: fx.Node) -> Mapping[str, Any]:
    if is_operator(node):
        return {**named_arguments(node, node.args), **node.kwargs}
    return {**{str(i): x for i, x in enumerate(node.args)}, **node.kwargs}


def _without_nodes(x: Any) -> Any:
    return fx.node.map_arg(x, lambda _: None)
