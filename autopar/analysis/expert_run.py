"""One run of a mixture of experts: sort, body, and back in order, called or written down for one rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.analysis.exchange import Emit, Exchange
from autopar.rules import operator_name
from autopar.rules.grouped import PRODUCTS


class ExpertBody:
    """The graph of a mixture-of-experts layer between its two permutations, and how its operands enter.

    Args:
        body: the layer between the two permutations: a function of the sorted rows, the sorted ids, the
            end of every expert's rows (as `grouped_mm` takes it), and the weights.
        slots: for every operand in `rows`, the number of consecutive entries of `ids` that belong to one row (k of
            top-k, or 1).
        count: number of experts.
    """

    def __init__(self, body: fx.GraphModule, slots: Sequence[int], count: int) -> None:
        self.body, self.slots, self.count = body, tuple(slots), count
        self.inputs: list[fx.Node] = list(body.graph.find_nodes(op="placeholder"))
        self.calls = [n for n in body.graph.nodes if n.op == "call_function"]
        self.result: fx.Node = list(body.graph.nodes)[-1].args[0]

    @property
    def sorted_ids(self) -> fx.Node:
        return self.inputs[len(self.slots)]

    @property
    def ends(self) -> fx.Node:
        return self.inputs[len(self.slots) + 1]

    def outer(self, node: fx.Node) -> int | None:
        """The position of the operand that an input of the body is; None for sorted ids and ends."""
        position, rows = self.inputs.index(node), len(self.slots)
        if position in (rows, rows + 1):
            return None
        return position if position < rows else position - 1


aten = torch.ops.aten


@dataclass(frozen=True)
class LayerRun:
    """One run of the layer: in the captured graph, or written down for one rank.

    Attributes:
        emit: function that makes a call, or adds it to a graph.
        count: number of experts that rows are sorted by: those of this rank, or all where rows are exchanged.
        slots: for every operand with rows, the number of local ids for each of its rows.
        is_part: whether there are ids of other ranks' experts; such an id is `count`, and sorts behind all others.
        exchange: exchange of rows with the ranks of their experts; None where rows stay on their rank.
    """

    experts: ExpertBody
    operands: Sequence[Any]
    emit: Emit
    count: int
    slots: Sequence[int]
    is_part: bool = False
    exchange: Exchange | None = None

    def result(self, run: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """Sorts, runs the body by `run`, and puts the rows back into their order."""
        emit, experts = self.emit, self.experts
        count = self.count
        rows = len(experts.slots)
        ids = self.operands[rows]
        values = emit(aten.sort.default, ids)
        ordered, order = (emit(operator.getitem, values, i) for i in range(2))
        one_each = emit(aten.new_ones.default, ids, [count])
        numbers = emit(aten.sub.Scalar, emit(aten.cumsum.default, one_each, 0), 1)
        ends = emit(aten.searchsorted.Tensor, ordered, numbers, out_int32=True, right=True)
        gone = emit(aten.ge.Scalar, ordered, count) if self.is_part else None
        inputs = [self._gathered(x, order, i, gone) for i, x in enumerate(self.operands[:rows])]
        here = emit(aten.clamp.default, ordered, max=count - 1) if self.is_part else ordered
        if self.exchange:
            inputs, here, ends = self.exchange.dispatch(inputs, ends)
        inputs += [here, ends, *self.operands[rows + 1 :]]
        found = dict(zip(experts.inputs, inputs, strict=True))
        for node in experts.calls:
            found[node] = self._run_call(node, found, gone, run)
        last = self._hide(found[experts.result], gone, experts.result)
        if self.exchange:
            last = self.exchange.combine(last)
        back = emit(aten.argsort.default, order)
        return emit(aten.index.Tensor, last, [back])

    def _gathered(self, x: Any, order: Any, position: int, gone: Any) -> Any:
        slots = self.slots[position]
        rows = order if slots == 1 else self.emit(aten.floor_divide.default, order, slots)
        found = self.emit(aten.index.Tensor, x, [rows])
        return self._hide(found, gone, self.experts.inputs[position])

    def _run_call(self, node: fx.Node, found: dict[fx.Node, Any], gone: Any, run: Any) -> Any:
        """The result of a call. Rows of no group, for which grouped_mm defines no result or gradient, become zero."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
        if operator_name(node) not in PRODUCTS:
            return run(node, args, kwargs)
        hidden = self._hide(args[0], gone, node.args[0])
        return self._hide(run(node, (hidden, *args[1:]), kwargs), gone, node)

    def _hide(self, rows: Any, gone: Any, like: Any) -> Any:
        """Zeros for the rows that belong to experts of other ranks."""
        if gone is None:
            return rows
        for dim in range(1, like.meta["val"].ndim):
            gone = self.emit(aten.unsqueeze.default, gone, dim)
        return self.emit(aten.masked_fill.Scalar, rows, gone, 0)
