"""The solutions of the mixed-integer program of one mesh axis, for any bound on memory.

The fastest assignment without a bound, and the one of least memory, are the same for every bound. They are kept, so
that a search with another bound solves only the program with that bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import SearchError
from autopar.search.exact.decisions import Assignment, Outcome
from autopar.search.exact.milp import AxisProgram
from autopar.search.exact.problem import Problem


@dataclass
class AxisSolutions:
    """The solutions of the program of one axis, solved when they are first asked for.

    Attributes:
        problem: the folded graph with its prices.
        axis: position of the axis whose choices are decided.
        given: assignment whose choices along the other axes are kept.
    """

    problem: Problem
    axis: int
    given: Assignment
    _bounded: dict[float, Outcome] = field(default_factory=dict)
    _infeasible: float = -math.inf  # largest bound within which there is known to be no assignment
    _known_bytes: float = math.inf  # least bytes of an assignment that is known

    @classmethod
    def of(cls, problem: Problem, axis: int, given: Assignment) -> AxisSolutions:
        """The solutions for these arguments; the problem keeps them for each set of labels along the other axes."""
        elsewhere = tuple((*labels[:axis], *labels[axis + 1 :]) for labels in given.labels)
        key = (axis, elsewhere)
        if key not in problem.solved:
            problem.solved[key] = cls(problem, axis, given)
        found = problem.solved[key]
        assert isinstance(found, AxisSolutions)
        return found

    @cached_property
    def fastest(self) -> Outcome | None:
        """The fastest assignment without a bound on memory; None if the recipes and pins allow none.

        If memory has a price (`Problem.byte_seconds`), the assignment with the least sum of seconds and price.
        """
        if self.problem.byte_seconds:
            return self._program.solve()
        return AxisProgram(self.problem, self.axis, self.given, saves_memory=False).solve()

    @cached_property
    def smallest(self) -> Outcome:
        """The assignment that takes least memory. Raises SearchError if the recipes and pins allow none."""
        found = self._program.solve(minimize="bytes")
        if found is None:
            names = ", ".join(self.problem.mesh.names)
            raise SearchError(f"No plan satisfies the recipe and the pins on the axes {names}.")
        return found

    def within(self, bound: float) -> Outcome:
        """The fastest assignment within a bound, or the smallest one if none is within."""
        if bound <= self._infeasible:
            return self.smallest
        if bound not in self._bounded:
            is_possible = bound >= self._known_bytes or bound >= self.smallest.least_bytes
            found = self._program.solve(max_bytes=bound) if is_possible else None
            if found is None:
                self._infeasible = bound
                return self.smallest
            self._bounded[bound] = found
            self.knows(found.bytes)
        return self._bounded[bound]

    def least_seconds(self, bound: float) -> float:
        """A lower bound on the weighed seconds of all assignments within a bound; see `AxisProgram.least_seconds`."""
        return self._program.least_seconds(bound)

    def knows(self, bytes: float) -> None:
        """Notes the bytes of an assignment with these choices along the other axes: some fit into as many or more.

        Then the assignment of least memory need not be searched before one within such a bound.
        """
        self._known_bytes = min(self._known_bytes, bytes)

    @cached_property
    def _program(self) -> AxisProgram:
        """The program that includes slower ways to store parameters that save memory."""
        return AxisProgram(self.problem, self.axis, self.given, saves_memory=True)


def excess(bytes: float, bound: float | None) -> float:
    """Bytes by which `bytes` exceeds a bound; 0 if it does not, or if the bound is None."""
    return 0.0 if bound is None else max(0.0, bytes - bound)


def seconds_refused(found: Outcome | None, bound: float | None) -> float:
    """Seconds of an assignment that exceeds the bound; infinite for one that fits, or for None."""
    return found.seconds if found is not None and excess(found.bytes, bound) else math.inf
