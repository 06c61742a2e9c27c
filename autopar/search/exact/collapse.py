"""Views without a decision of their own.

[Note: collapse] A view copies no data, and converting its operand costs as much as converting its result. Suppose that
the view is the only consumer of its operand, and that every state in which the operand may be produced leads to exactly
one state of the result. Then the view needs no decision of its own: it takes the operand in the state in which it is
produced. The search removes its decision ("collapses" the view), and treats its result as a result of the op before
it. All other ops keep their decisions, so that the best plan stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_model import SavedTensors
from autopar.ir import Choice, Graph, Op
from autopar.search.exact.choice_filter import ChoiceFilter
from autopar.search.exact.decisions import Made
from autopar.search.exact.fold import Fold
from autopar.search.request.pins import Pins


class CollapsedViews:
    """Finds the views that a search on a folded graph collapses, see [Note: collapse].

    Args:
        graph: captured model.
        fold: folded graph of the model.
        saved: views of the graph, as autograd saves them.
        pins: choices that the user has fixed.
        filters: for every axis, the choices that its recipe allows.
        dividing: for every class and axis, the choices whose factor the axis size divides.

    Attributes:
        collapsed: index of the class of a collapsed view -> the class that computes its operand.
        made: index of an entry that an op computes -> the class that computes it.
    """

    def __init__(
        self,
        graph: Graph,
        fold: Fold,
        saved: SavedTensors,
        pins: Pins,
        filters: Sequence[ChoiceFilter],
        dividing: Sequence[Sequence[Sequence[Choice]]],
    ) -> None:
        self._graph, self._saved, self._pins = graph, saved, pins
        self._filters, self._dividing = filters, dividing
        self._entries = fold.entries
        self._ops = [each.op for each in fold.classes]
        self._entries_of = self._find_entries()
        self.collapsed: dict[int, Made] = {}
        self.made: dict[int, Made] = {}
        self._find()

    def _find_entries(self) -> dict[int, list[int]]:
        """Index of a class -> indices of the entries of its results."""
        found: dict[int, list[int]] = {}
        for index, entry in enumerate(self._entries):
            if entry.producer is not None:
                found.setdefault(entry.producer[0], []).append(index)
        return found

    def _find(self) -> None:
        for index in range(len(self._ops)):
            operand = self._only_operand(index)
            passed = self._passes(index, self.made[operand]) if operand is not None else None
            if operand is not None and passed is not None:
                self.collapsed[index] = self.made[operand]
            for entry in self._entries_of.get(index, ()):
                producer = self._entries[entry].producer
                assert producer is not None
                self.made[entry] = passed or Made(*producer)

    def _only_operand(self, index: int) -> int | None:
        """The entry of a view's operand, if an op computes it and only this view uses it; else None."""
        op = self._ops[index]
        uses = [e for e, entry in enumerate(self._entries) if (index, 0) in entry.consumers]
        if not op.is_view or len(op.operands) != 1 or len(uses) != 1:
            return None
        entry = self._entries[uses[0]]
        if entry.producer is None or entry.is_output or len(entry.consumers) > 1:
            return None
        siblings = [
            other for other in self._entries_of[entry.producer[0]] if self._entries[other].producer == entry.producer
        ]
        return uses[0] if len(siblings) == 1 else None

    def _passes(self, index: int, producer: Made) -> Made | None:
        """The class that computes the result of a view if the view is collapsed; None if it cannot be collapsed."""
        op, source = self._ops[index], self._ops[producer.index]
        view = self._saved.view(op.results[0])
        if view is None or not view.is_whole or op.name in self._pins.labels or not self._same_factors(op):
            return None
        onward = {before: after for after, before in view.states.items()}
        for axis, choices in enumerate(self._filters):
            given = choices.allowed(source, self._dividing[producer.index][axis])
            taken = choices.allowed(op, self._dividing[index][axis])
            accepted = {choice.operands[0] for choice in taken}
            unsplit = [choice for choice in source.choices if not choice.splits]
            reached = {producer.state(choice.results[producer.position]) for choice in given}
            fallback = {producer.state(choice.results[producer.position]) for choice in unsplit}
            if not reached <= accepted or not reached | fallback <= onward.keys():
                return None
        return Made(producer.index, producer.position, (*producer.views, onward))

    def _same_factors(self, op: Op) -> bool:
        """Whether a view's choices split factors of the same size in its operand and result."""
        before, after = (self._graph.tensors[name].dims for name in (op.operands[0], op.results[0]))
        pairs = [(c.operands[0], c.results[0]) for c in op.choices if c.splits]
        return all(a.kind == b.kind == "S" and before[a.dim][a.factor] == after[b.dim][b.factor] for a, b in pairs)
