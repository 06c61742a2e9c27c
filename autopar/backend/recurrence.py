"""Decides which sets of sizes of a graph get a plan.

[Note: sizes that depend on values] The sizes of most scripts recur: a few batch sizes, a few lengths. Sizes that
depend on values, such as the number of rows that a router gives to an expert (`x[mask]`, `nonzero`), seldom do, and a
plan for each takes longer than the step. So the first few sets of sizes are planned when they come. A later one runs
whole on every rank until it has been met often enough, and the more plans there are, the more often: what planning
takes is then small beside the calls that it serves. All ranks see the same sizes, and decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable

PLANNED_AT_ONCE = 4  # sets of sizes
CALLS_PER_PLAN = 4  # calls with a later set until it is planned, for each plan that there is
_REMEMBERED = 1024  # sets of sizes whose calls are counted


class Recurrence:
    """Decides which sets of argument sizes of one graph get a plan, by how often the graph is called with each.

    The first `PLANNED_AT_ONCE` sets get a plan at their first call. With n plans made, a later set gets one at
    its call number `CALLS_PER_PLAN * n`; until then the caller runs the graph without splitting it.
    """

    def __init__(self) -> None:
        self._plans = 0
        self._calls: dict[Hashable, int] = {}  # number of calls of each set without a plan, the latest set last

    @property
    def sets(self) -> int:
        """The number of sets of sizes so far, as far as they are remembered."""
        return self._plans + len(self._calls)

    def pays(self, sizes: Hashable) -> bool:
        """Whether to plan for these sizes, which have no plan, at this call.

        >>> recurrence = Recurrence()
        >>> [recurrence.pays(rows) for rows in (3, 9, 4, 1, 5)]
        [True, True, True, True, False]
        >>> sum(recurrence.pays(5) for _ in range(15))  # at its 16th call
        1
        """
        calls = self._calls.pop(sizes, 0) + 1
        if self._plans < PLANNED_AT_ONCE or calls >= CALLS_PER_PLAN * self._plans:
            self._plans += 1
            return True
        self._calls[sizes] = calls
        if len(self._calls) > _REMEMBERED:
            del self._calls[next(iter(self._calls))]
        return False
