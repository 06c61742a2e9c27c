"""Finds how every tensor of a step over a batch comes from the tensors of its micro-batches.

The kinds follow from two things: the choices that the rules give each op along the batch (docs/rules.md), which say
whether the op treats rows separately and whether its result is then a part (S) or an addend (P); and the numbers of the
step that count rows (`autopar.analysis.row_counts`). With f_i the rows of micro-batch i as a fraction of those of the
batch, 1 / m where all of m have as many, a tensor x of the batch is one of

    same       x = x_i * f_i**k         of every micro-batch i: a parameter (k = 0), the number of rows (k = -1)
    rows       x = cat(x_i * f_i**k)    logits (k = 0), a weight 1 / len(targets) for every row (k = 1)
    places     x = 0, 1, ...            indices of the rows: torch.arange(len(targets))
    total      x = sum(x_i * f_i**k)    a sum over rows (k = 0), a mean over them (k = 1)
    ratio      x = n / d                a total divided by a number that is known before the step
    function   x = f(totals)            of totals that are known before the step: labels and masks

or unknown. The k of a tensor is its `power`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from autopar.analysis.row_counts import SIZES, RowCounts
from autopar.capture.captured import Captured
from autopar.capture.remedies import traced_line
from autopar.ir import PARTIAL, Choice, Graph, Op
from autopar.ops.nodes import bound_arguments, draws

Kind = Literal["same", "rows", "places", "total", "ratio", "function", "unknown"]

_AVERAGES = ("aten.mean",)
_MASKED_MEANS = ("aten.cross_entropy_loss", "autopar.linear_cross_entropy", "aten.nll_loss_nd")
_NEW = ("aten.new_full", "aten.new_ones", "aten.new_zeros")  # take the format of their operand alone
_EQUAL_ROWS = ("aten.expand", "aten.full", "aten.ones", "aten.zeros", *_NEW)
_SAME_VALUES = ("aten.clone", "aten.detach", "aten.alias")
_MOVES = (*_SAME_VALUES, "aten.unsqueeze", "aten.squeeze", "aten.reshape", "aten.view")
_FILL = "fill_value"
_KNOWN_BEFORE = ("total", "function")
_MEAN_REDUCTION = 1  # value of a loss op's `reduction` argument (torch.nn._reduction)


@dataclass(frozen=True)
class BatchPart:
    """How the value of a tensor for the whole batch follows from its values in the micro-batches.

    Attributes:
        kind: one of `Kind`.
        power: exponent of the fraction of rows that the tensor is multiplied by; of a ratio, that of its numerator.
        denominator: name of the node that a ratio divides by; "" for other kinds.
    """

    kind: Kind
    power: int = 0
    denominator: str = ""


UNKNOWN, _SAME, _PLACES = BatchPart("unknown"), BatchPart("same"), BatchPart("places")
_MEAN = BatchPart("total", 1)


def batch_factors(graph: Graph) -> set[str]:
    """Names of the factors that are the batch: the first of every input."""
    factors = [graph.tensors[name].factors for name in graph.inputs.values()]
    return {dims[0][0] for dims in factors if dims and dims[0]}


def places_of(factors: Sequence[Sequence[str]], batch: Collection[str]) -> list[tuple[int, int]]:
    """Pairs (dim, index of the factor within that dim) for every factor of a tensor that belongs to the batch."""
    return [(d, i) for d, names in enumerate(factors) for i, x in enumerate(names) if x in batch]


class PartFinder:
    """Goes through the ops of a step in order, and finds how every tensor comes from micro-batches.

    Args:
        captured: the step as captured for the batch.
        graph: its analysis.
        part: the step as captured for a micro-batch; the batch's own capture if there is no other, and then no number
            is taken to count rows.
        normalizes: whether results of a batch norm are taken for rows, although all rows have a part in them.

    Attributes:
        graph: the graph of the batch.
        nodes: name of an op of the graph -> node of the batch's capture.
        counts: the numbers of the step that count rows.
        batch: names of the factors that are the batch: the first of every input, and multiples of it.
    """

    def __init__(self, captured: Captured, graph: Graph, part: Captured, *, normalizes: bool = False) -> None:
        self.graph, self._normalizes = graph, normalizes
        by_name = {node.name: node for node in captured.module.graph.nodes}
        # A graph of few layers has names of its own; the first copy stands for all of them.
        renamed = {name: by_name[copies[0]] for name, copies in graph.copies.items() if copies[0] in by_name}
        self.nodes = by_name | renamed
        self._repeated = {name for name, copies in graph.copies.items() if len(copies) > 1}
        self.counts = RowCounts(captured, part)
        self.batch = batch_factors(graph)
        self._parts: dict[str, BatchPart] = {}
        if self.counts.is_alike:
            self.batch |= self._longer()
            self._find()

    def part(self, tensor: str) -> BatchPart:
        """How the tensor of the whole batch follows from those of its micro-batches; unknown where their rows differ.

        A parameter or buffer is the same in all of them.
        """
        return self._parts.get(tensor, _SAME) if self.counts.is_alike else UNKNOWN

    def counts_rows(self, name: str) -> bool:
        """Whether the op of a node has a number, or an operand other than a total, that counts rows."""
        op = self.graph.by_name.get(name)
        if op is None:
            return False
        powers = [self.part(x).power for x in op.operands if self.part(x).kind == "same"]
        return any(powers) or bool(self._changed(op))

    def addends(self, op: Op) -> list[str]:
        """The operands in which an op is linear, so that it adds them up; none if there is no such op.

        Its other operands are the same in every micro-batch, as a weight of a term is.
        """
        if not self.counts.is_alike:
            return []
        parts = [self.part(name) for name in op.operands]
        is_plain = not self._changed(op) and len(op.results) == 1 and op.name not in self._repeated
        if not is_plain or any(part.kind == "same" and part.power for part in parts):
            return []
        vary = [part.kind != "same" for part in parts]
        for is_addend in (vary, [True] * len(parts)):
            if _linear(op, is_addend):
                return [x for x, adds in zip(op.operands, is_addend, strict=True) if adds]
        return []

    def obstacle(self, tensor: str) -> str:
        """The first op on the way to a tensor whose result does not follow from micro-batches, with its line."""
        if not self.counts.is_alike:
            return "the model runs other ops for a micro-batch than for the batch"
        found, waiting = "a constant that counts rows", [tensor]
        while waiting:
            op = self.graph.producer.get(waiting.pop())
            if op is None:
                continue
            found = f"{op.kind.removeprefix('aten.')} ({traced_line(self.nodes[op.name])})"
            waiting = [x for x in op.operands if self.part(x).kind in ("unknown", "function")][:1]
        return f"{found} is neither a row for every sample nor a sum, mean or ratio over them"

    def _longer(self) -> set[str]:
        """Names of the factors whose size in the batch is to that in a micro-batch as their numbers of rows are."""
        ratio, tensors = self.counts.ratio, self.graph.tensors
        pairs = [
            (tensors[name], own)
            for op in self.graph.ops
            for name, own in zip(op.results, self.counts.shapes(self.nodes[op.name].name), strict=False)
        ]
        return {
            names[0]
            for tensor, own in pairs
            for names, size, part in zip(tensor.factors, tensor.shape, own, strict=False)
            if ratio > 1 and len(names) == 1 and names[0] and size == part * ratio > 0
        }

    def _find(self) -> None:
        for name, power in self.counts.constant_powers():
            self._parts[name] = UNKNOWN if power is None else BatchPart("same", power)
        for name in self.graph.inputs.values():
            tensor = self.graph.tensors[name]
            part = BatchPart("rows") if tensor.dims else _SAME
            self._parts[name] = self._of_right_shape(part, name, self.counts.shapes(name)[0])
        for op in self.graph.ops:
            shapes = self.counts.shapes(self.nodes[op.name].name)
            for i, (name, part) in enumerate(zip(op.results, self._results(op), strict=True)):
                is_visible = i < len(shapes)
                self._parts[name] = self._of_right_shape(part, name, shapes[i]) if is_visible else part

    def _of_right_shape(self, part: BatchPart, name: str, own: tuple[int, ...]) -> BatchPart:
        """The part, or unknown if the shape in a micro-batch does not fit it.

        Rows are parts of one factor; everything else has the same shape in the batch and a micro-batch.
        """
        tensor = self.graph.tensors[name]
        expected: list[int | Fraction] = list(tensor.shape)
        if part.kind in ("rows", "places"):
            places = places_of(tensor.factors, self.batch)
            if len(places) != 1:
                return UNKNOWN
            expected[places[0][0]] /= self.counts.ratio
        return part if tuple(expected) == own else UNKNOWN

    # --- one op

    def _results(self, op: Op) -> list[BatchPart]:
        parts = [_SAME if op.kind in _NEW else self.part(name) for name in op.operands]
        kinds = {part.kind for part in parts}
        if "unknown" in kinds:
            return [UNKNOWN] * len(op.results)
        if kinds <= {"same"}:
            return [self._made(op, name, parts) for name in op.results]
        if "places" in kinds:
            return [self._of_places(op, parts)] * len(op.results)
        if "rows" in kinds:
            return self._of_rows(op, parts) if kinds <= {"rows", "same"} else self._none(op)
        return [self._of_totals(op, parts)] * len(op.results)

    @staticmethod
    def _none(op: Op) -> list[BatchPart]:
        return [UNKNOWN] * len(op.results)

    def _made(self, op: Op, result: str, parts: list[BatchPart]) -> BatchPart:
        """The part of a tensor that depends on no input: the same in every part, or equal rows in all."""
        power = self._power(op, parts)
        has_rows = bool(places_of(self.graph.tensors[result].factors, self.batch))
        if has_rows and self._numbers_rows(op):
            return _PLACES
        if power is None or draws(self.nodes[op.name]):
            return UNKNOWN
        if not has_rows:
            return BatchPart("same", power)
        return BatchPart("rows", power) if op.kind in _EQUAL_ROWS else UNKNOWN

    def _of_rows(self, op: Op, parts: list[BatchPart]) -> list[BatchPart]:
        """The part of an op that treats the rows of the batch separately."""
        choice = next((c for c in op.choices if c.factor in self.batch and _takes_rows(c, parts)), None)
        power = self._power(op, parts)
        if choice is None or power is None:
            return self._none(op)
        masked = self.masked_mean(op)
        is_normalized = self._normalizes and "batch_norm" in op.kind
        joins = any(choice.label in each.labels for each in op.collectives)
        if masked == UNKNOWN and joins and not is_normalized:
            return self._none(op)  # its parts depend on each other, as in a batch norm
        total = BatchPart("total", power + (op.kind in _AVERAGES))
        made = {"S": BatchPart("rows", power), "P": masked if masked != UNKNOWN else total}
        return [made.get(state.kind, UNKNOWN) for state in choice.results]

    def _numbers_rows(self, op: Op) -> bool:
        """Whether an op returns 0, 1, ... up to the number of rows."""
        given = bound_arguments(self.nodes[op.name]) if op.kind == "aten.arange" else {}
        is_plain = given.get("start", 0) == 0 and given.get("step", 1) == 1
        return bool(given) and is_plain and self._changed(op).keys() <= {"end"}

    def _of_places(self, op: Op, parts: list[BatchPart]) -> BatchPart:
        """The part of an op on row numbers: row numbers in another shape, or rows that are looked up by them."""
        args = self.nodes[op.name].args
        adds_nothing = op.kind == "aten.add" and len(parts) == 1 and args[1:] == (0,)
        if self._changed(op) or op.kind != "aten.index":
            is_moved = not self._changed(op) and len(parts) == 1
            return _PLACES if is_moved and (op.kind in _MOVES or adds_nothing) else UNKNOWN
        values, number, *others = parts
        as_rows = [_SAME, BatchPart("rows"), *(replace(x, power=0) for x in others)]
        first = args[1][0] if isinstance(args[1], (list, tuple)) else None
        is_looked_up = (
            number == _PLACES
            and getattr(first, "name", "") == op.operands[1]
            and all(part in (_SAME, BatchPart("rows")) for part in others)
            and self._has_rows_first(values, op.operands[0])
            and any(c.factor in self.batch and _takes_rows(c, as_rows) for c in op.choices)
        )
        return BatchPart("rows") if is_looked_up else UNKNOWN

    def _has_rows_first(self, part: BatchPart, tensor: str) -> bool:
        """Whether dim 0 of a tensor is the batch; assumed if there is no capture of another size."""
        if part == _SAME and self.counts.ratio == 1:
            return True
        return part == BatchPart("rows") and self.graph.tensors[tensor].factors[0] == (
            *(name for name in self.graph.tensors[tensor].factors[0] if name in self.batch),
        )

    def masked_mean(self, op: Op) -> BatchPart:
        """The ratio for a masked mean; unknown for any other op."""
        is_masked = op.kind in _MASKED_MEANS and self._averages(op)
        return BatchPart("ratio", 0, op.name) if is_masked else UNKNOWN

    def _averages(self, op: Op) -> bool:
        return bound_arguments(self.nodes[op.name]).get("reduction") == _MEAN_REDUCTION

    def _of_totals(self, op: Op, parts: list[BatchPart]) -> BatchPart:
        """The part of an op on sums and means over the batch."""
        totals = {part for part in parts if part.kind != "same"}
        power = self._power(op, [p if p.kind == "same" else replace(p, power=0) for p in parts])
        if op.kind == "aten.div" and len(parts) == 2 and self._divides(op, parts):
            return BatchPart("ratio", parts[0].power, op.operands[1])
        if power is None:
            return UNKNOWN
        if op.kind in ("aten.add", "aten.sub") and totals == {_MEAN}:
            return _MEAN  # the mean of x_i + c is that of x_i, and c
        if len(totals) == 1 and _linear(op, [part.kind != "same" for part in parts]):
            (total,) = totals
            return replace(total, power=total.power + power)
        if power or any(self.graph.tensors[t].needs_grad for t in op.operands):
            return UNKNOWN
        return BatchPart("function") if all(t.kind in _KNOWN_BEFORE for t in totals) else UNKNOWN

    def _divides(self, op: Op, parts: list[BatchPart]) -> bool:
        """Whether an op divides a total by a number that is known before backward."""
        over, under = parts
        return (
            over.kind == "total"
            and under.kind in _KNOWN_BEFORE
            and not self.graph.tensors[op.operands[1]].needs_grad
            and not self._changed(op)
        )

    # --- powers of the fraction of rows

    def _power(self, op: Op, parts: Sequence[BatchPart]) -> int | None:
        """The power of an op's results; None if its numbers or operands count rows in another way."""
        own = self._power_of_numbers(op)
        powers = [part.power for part in parts]
        if own is None or not any(powers):
            return own
        sign = self._scaling(op)
        if sign and len(parts) == 2:
            return own + powers[0] + sign * powers[1]
        (power, *others) = {power for power in powers if power}
        is_one = not others and (self._copies(op) or _linear(op, [bool(power) for power in powers]))
        return own + power if is_one else None

    def _copies(self, op: Op) -> bool:
        """Whether an op returns its operand unchanged, or cast to a floating dtype."""
        value = self.nodes[op.name].meta["val"]
        return op.kind in _SAME_VALUES or (op.kind == "aten._to_copy" and value.is_floating_point())

    def _power_of_numbers(self, op: Op) -> int | None:
        """The power that the numbers among an op's arguments contribute."""
        power = 0
        for name, (batch, part) in self._changed(op).items():
            found = self.counts.power(batch, part)
            sign = 1 if name == _FILL else self._scaling(op) if name == "other" else 0
            if found is None or not sign:
                return None
            power += sign * found
        return power

    def _scaling(self, op: Op) -> int:
        """1 for an op that multiplies its first operand by `other`, -1 for one that divides by it, else 0."""
        if op.kind == "aten.mul":
            return 1
        rounds = bound_arguments(self.nodes[op.name]).get("rounding_mode")
        return -1 if op.kind == "aten.div" and rounds is None else 0

    def _changed(self, op: Op) -> dict[str, tuple[object, object]]:
        """The arguments of an op, except sizes, that differ in a micro-batch."""
        found = self.counts.changed(self.nodes[op.name])
        return {name: pair for name, pair in found.items() if name not in SIZES}


def _takes_rows(choice: Choice, parts: list[BatchPart]) -> bool:
    """Whether a choice takes parts of operands with rows, and whole operands that are the same everywhere."""
    pairs = zip(choice.operands, parts, strict=True)
    return all((state.kind == "S") == (part.kind == "rows") for state, part in pairs)


def _linear(op: Op, is_addend: Sequence[bool]) -> bool:
    """Whether an op is linear in some of its operands, so that addends pass through it."""
    return any(
        choice.label.startswith(PARTIAL)
        and all((state.kind == "P") == is_part for state, is_part in zip(choice.operands, is_addend, strict=True))
        for choice in op.choices
    )
