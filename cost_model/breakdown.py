"""A cost as a tree: an expression with its value, and the parts that it is the sum of."""

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
        name: what it is, in words a person reads, such as `saved activations` or `aten.linear`.
        unit: unit of the value.
        expression: formula in named symbols; its free symbols are those of the explanation.
        value: value of the expression at the explanation's numbers, in `unit`.
        parts: what it is made of, largest first. `value` is their sum, unless `note` says otherwise.
        note: what a reader should know about it, such as "hidden behind compute".
    """

    name: str
    unit: Unit
    expression: sympy.Expr
    value: float
    parts: tuple[Breakdown, ...] = ()
    note: str = ""

    def part(self, name: str) -> Breakdown:
        """The direct part of this name. Raises KeyError listing what there is."""
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
        """Name, value under the key of its unit, expression as text, and parts."""
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
    """Prints a formula as `str` does, and a term that many formulas have in common only once."""

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
    """Something that takes time on one lane of a predicted step.

    Attributes:
        lane: "compute", or the name of a mesh axis for its communication.
        name: such as `linear forward` or `all_gather layers.*.up.weight`.
        start_seconds: from the start of the step.
        duration_seconds: how long.
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
        step_seconds: predicted.
        memory_bytes: predicted peak of a rank.
        traffic_bytes: sent by a rank in a step.
        binds: cause with the most seconds, such as "compute", "along tp" or "bubble".
        fits: whether the memory is enough.
        chosen: whether it is the plan that was chosen.
        why_not: what it loses by, in words; "" for the chosen one.
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
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (c.step_seconds, c.memory_bytes)):
        if not front or each.memory_bytes < front[-1].memory_bytes:
            front.append(each)
    return tuple(front)
