"""What the programs of one mesh axis gave, given the choices on the others, under every bound on memory.

The fastest assignment and the smallest one do not depend on the bound, and neither does the program that
a bound is put on. So a search that is asked again for the same mesh with another bound solves only what
the new bound changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import SearchError
from autopar.search.milp import AxisProgram, Outcome
from autopar.search.problem import Assignment, Problem


@dataclass
class AxisSolutions:
    """The solutions of one axis.

    Attributes:
        problem: the folded graph with its prices.
        axis: the axis that is decided.
        given: the decisions along the other axes.
    """

    problem: Problem
    axis: int
    given: Assignment
    _bounded: dict[float, Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, axis: int, given: Assignment) -> AxisSolutions:
        """The solutions that the problem remembers, which depend on the labels along the other axes alone."""
        elsewhere = tuple((*labels[:axis], *labels[axis + 1 :]) for labels in given.labels)
        key = (axis, elsewhere)
        if key not in problem.solved:
            problem.solved[key] = cls(problem, axis, given)
        found = problem.solved[key]
        assert isinstance(found, AxisSolutions)
        return found

    @cached_property
    def fastest(self) -> Outcome | None:
        """The fastest assignment without a bound on memory; None where nothing is left.

        Where bytes have a price, the one with the least seconds and price together.
        """
        if self.problem.byte_seconds:
            return self._program.solve()
        return AxisProgram(self.problem, self.axis, self.given, thrifty=False).solve()

    @cached_property
    def smallest(self) -> Outcome:
        """The assignment that takes least memory. Raises SearchError where nothing is left."""
        found = self._program.solve(minimize="bytes")
        if found is None:
            names = ", ".join(self.problem.mesh.names)
            raise SearchError(f"The recipe and the pins on the axes {names} leave no plan at all.")
        return found

    def within(self, bound: float) -> Outcome:
        """The fastest assignment within a bound, or the smallest one if none is within."""
        if bound not in self._bounded:
            self._bounded[bound] = self._program.solve(max_bytes=bound) or self.smallest
        return self._bounded[bound]

    @cached_property
    def _program(self) -> AxisProgram:
        """The program in which strategies may save memory for time."""
        return AxisProgram(self.problem, self.axis, self.given, thrifty=True)


def excess(bytes: float, bound: float | None) -> float:
    """Bytes above a bound; 0 for none."""
    return 0.0 if bound is None else max(0.0, bytes - bound)


def seconds_refused(found: Outcome | None, bound: float | None) -> float:
    """Seconds of an assignment that does not fit; infinite for one that does."""
    return found.seconds if found is not None and excess(found.bytes, bound) else math.inf
