"""A cost as a tree: a formula with its value, and the parts of which it is the sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
from sympy.printing.str import StrPrinter

Unit = Literal["bytes", "seconds"]


@dataclass(frozen=True)
class Breakdown:
    """One cost of a step.

    Attributes:
        name: name of the cost for people, such as `saved activations` or `aten.linear`.
        unit: unit of the value.
        expression: formula of the cost, in the symbols of the explanation.
        value: value of the expression for the explained plan, in `unit`.
        parts: the parts of the cost, largest first. `value` is their sum, unless `note` says otherwise.
        note: remark for a reader, such as "hidden behind compute".
    """

    name: str
    unit: Unit
    expression: sympy.Expr
    value: float
    parts: tuple[Breakdown, ...] = ()
    note: str = ""

    def part(self, name: str) -> Breakdown:
        """The direct part called `name`. Raises KeyError with the names of all parts."""
        for each in self.parts:
            if each.name == name:
                return each
        raise KeyError(f"no part {name!r} of {self.name}; it has {[p.name for p in self.parts]}")

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Breakdown]]:
        """The tree in reading order, each node with its depth."""
        yield depth, self
        for each in self.parts:
            yield from each.walk(depth + 1)

    def to_json(self) -> dict[str, Any]:
        """The tree as JSON values: the name, the value (its key is the unit), the formula as text, and the parts."""
        return self._document(_TextPrinter())

    def _document(self, printer: _TextPrinter) -> dict[str, Any]:
        document: dict[str, Any] = {"name": self.name, self.unit: self.value}
        document["expression"] = printer.doprint(self.expression)
        if self.note:
            document["note"] = self.note
        if self.parts:
            document["parts"] = [each._document(printer) for each in self.parts]
        return document


class _TextPrinter(StrPrinter):
    """Prints formulas as `str` does. A term that many formulas share is converted to text only once."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: dict[Any, str] = {}

    def _print(self, expr: Any, **settings: Any) -> str:
        if settings or not isinstance(expr, sympy.Basic):
            return str(super()._print(expr, **settings))
        if expr not in self._printed:
            self._printed[expr] = str(super()._print(expr))
        return self._printed[expr]


@dataclass(frozen=True)
class Event:
    """Work on one lane of the timeline of a predicted step.

    Attributes:
        lane: "compute", or the name of a mesh axis for communication along it.
        name: name such as `linear forward` or `all_gather layers.*.up.weight`.
        start_seconds: time from the start of the step to the start of this work.
        duration_seconds: duration of the work.
        detail: figures for a reader, with units in the keys.
    """

    lane: str
    name: str
    start_seconds: float
    duration_seconds: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One way to run the model, as a row of a comparison.

    Attributes:
        name: mesh, recipe and schedule in a few words.
        step_seconds: predicted duration of a step.
        memory_bytes: predicted peak memory of a rank.
        traffic_bytes: bytes that a rank sends in a step.
        binds: cause with the most seconds, such as "compute", "along tp" or "bubble".
        fits: whether the peak memory fits the device.
        chosen: whether this is the plan that was chosen.
        why_not: reason why it was not chosen, in words; "" for the chosen plan.
    """

    name: str
    step_seconds: float
    memory_bytes: float
    traffic_bytes: float
    binds: str
    fits: bool
    chosen: bool = False
    why_not: str = ""


def pareto(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates for which no other needs both less time and less memory, fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (c.step_seconds, c.memory_bytes)):
        if not front or each.memory_bytes < front[-1].memory_bytes:
            front.append(each)
    return tuple(front)
