"""Lower bounds on the step of every plan of a mesh, over all of its axes at once.

Work that decisions share couples them: the best option of one depends on those of others. Each end of shared work gets
*potentials*, numbers that are added to the shared work and taken from the decision's own, so that no plan changes its
sum. Under any potentials the least work of every decision and of all shared work add up to a lower bound. Message
passing in sequence (TRW-S; Kolmogorov 2006) raises it: decision after decision, forward and then backward, it collects
what its ends can give, and shares it out to the ends whose other decisions come later.

Which multipliers of work and memory bound best depends on the plans (`autopar.search.exact.work`); they are those at
which the plans that were best under the multipliers so far take longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from autopar.search.exact.joint import End, JointProblem, Shared
from autopar.search.exact.problem import Problem
from autopar.search.exact.work import Numbers, StepPieces

_MOST_TARGETS = 6  # of shared work that are counted; messages take 3 ** targets operations
_SWEEPS = 12  # forward and backward; one to seven sufficed for seven models on two axes
_STALLED = 1e-5  # relative gain of a sweep after which no other is made
_MULTIPLIERS = 12  # choices of multipliers; two to seven sufficed
_CLOSE = 5e-4  # relative distance to what multipliers can still gain, or to the step
_ROUNDING = 1e-9  # of a bound, for sums in floating point
# Options of a decision, beyond which conversions between all of them take long to price: llama3-8b has 62 on two axes
# (1.4 s), and 703 on three (104 s).
_MOST_OPTIONS = 200


def least_seconds(problem: Problem, step_seconds: float, memory_bytes: float | None) -> float | None:
    """Seconds that no step of a plan within a bound on memory falls below; None where that takes too long to find.

    Args:
        problem: the search's data for one mesh.
        step_seconds: seconds of a known step; a bound as high is not raised any more.
        memory_bytes: bound on the peak memory of a rank; None for no bound.
    """
    if max(len(problem.joint_labels(index)) for index in problem.free) > _MOST_OPTIONS:
        return None
    pieces = StepPieces(problem, memory_bytes)
    joint = JointProblem(problem, pieces)
    multipliers, promised_seconds = pieces.hiding(), step_seconds
    works, best = list[Numbers](), 0.0
    for _ in range(_MULTIPLIERS):
        dual = Dual(joint, multipliers.of_work)
        best = max(best, dual.bound() + multipliers.constant_seconds)
        if best >= min(promised_seconds, step_seconds) - _CLOSE * step_seconds:
            break
        works += [joint.work_of(dual.decoded(forward), multipliers.of_work) for forward in (True, False)]
        multipliers, promised_seconds = pieces.highest(works, step_seconds)
    return (1 - _ROUNDING) * best


class _End:
    """An end of shared work with its potentials; layouts that no option has are infinitely dear."""

    def __init__(self, end: End, layouts: int, place: Shares) -> None:
        self.decision, self.layouts, self.place = end.decision, end.layouts, place
        self._order = np.argsort(end.layouts, kind="stable")
        ordered = end.layouts[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self._present = ordered[self._starts]
        self.potentials = np.full(layouts, np.inf)
        self.potentials[self._present] = 0.0

    def least(self, work: Numbers) -> Numbers:
        """For every layout the least work of the options that have it; 0 where there is no finite one."""
        found = np.zeros(len(self.potentials))
        found[self._present] = np.minimum.reduceat(work[self._order], self._starts)
        return np.where(np.isfinite(found), found, 0.0)


class Shares:
    """Shared work, as seconds, with its ends."""

    def __init__(self, shared: Shared, of_work: Numbers) -> None:
        self._seconds = shared.work @ of_work
        sources, targets = self._seconds.shape
        self._source = _End(shared.source, sources, self)
        self._targets = [_End(each, targets, self) for each in shared.targets[:_MOST_TARGETS]]
        self.ends = (self._source, *self._targets)

    def message(self, end: _End) -> Numbers:
        """For every layout of an end, the least seconds and potentials of the rest."""
        others = [each for each in self._targets if each is not end]
        served, sums = self._served(others)
        if end is self._source:
            return end.potentials + served[-1]
        # The targets in the subset have the layout of this end, and others are served apart.
        found = [
            (self._seconds + (self._source.potentials + served[-1 - subset])[:, None]).min(axis=0) + potentials
            for subset, potentials in enumerate(sums)
        ]
        return end.potentials + np.minimum.reduce(found)

    def _served(self, targets: Sequence[_End]) -> tuple[list[Numbers], list[Numbers]]:
        """For every subset of targets: least seconds to serve it from each source; its potentials at each layout."""
        sources, layouts = self._seconds.shape
        served, sums, together = [np.zeros(sources)], [np.zeros(layouts)], [np.zeros(sources)]
        for subset in range(1, 1 << len(targets)):
            first = subset & -subset
            others = subset ^ first
            sums.append(sums[others] + targets[first.bit_length() - 1].potentials)
            together.append((self._seconds + sums[subset]).min(axis=1))
            apart = others
            best = together[subset]
            while apart:
                best = np.minimum(best, together[subset ^ apart] + served[apart])
                apart = (apart - 1) & others
            served.append(best)
        return served, sums

    def least(self) -> float:
        """The least seconds and potentials of all."""
        return float(self.message(self._source).min())


class Dual:
    """Potentials of a joint problem under some multipliers, and the plans that they point to.

    Args:
        joint: the joint problem.
        of_work: seconds that count for every kind of work.
    """

    def __init__(self, joint: JointProblem, of_work: Numbers) -> None:
        self._work = [each @ of_work for each in joint.work]
        for each in joint.lone:
            best = np.array([(ways @ of_work).min() for ways in each.work])
            self._work[each.use.decision] += best[each.use.layouts]
        self._shares = [Shares(each, of_work) for each in joint.shared]
        self._ends: list[list[_End]] = [[] for _ in self._work]
        for end in (end for shares in self._shares for end in shares.ends):
            self._ends[end.decision].append(end)
        self._order = sorted(range(len(self._work)), key=lambda each: joint.leads.get(each, each + 0.5))
        self._turn = {each: turn for turn, each in enumerate(self._order)}

    def bound(self) -> float:
        """The bound after as many sweeps as gain something."""
        bound = -np.inf
        for _ in range(_SWEEPS):
            self._sweep(self._order, 1)
            self._sweep(self._order[::-1], -1)
            before, bound = bound, max(bound, self._sum())
            if bound - before < _STALLED * abs(bound):
                break
        return float(bound)

    def _sum(self) -> float:
        return sum(float(each.min()) for each in self._work) + sum(each.least() for each in self._shares)

    def _sweep(self, order: Sequence[int], direction: int) -> None:
        for decision in order:
            work, ends = self._work[decision], self._ends[decision]
            for end in ends:
                message = end.place.message(end)
                work = work + message[end.layouts]
                end.potentials -= np.where(np.isfinite(message), message, 0.0)
            onward = [end for end in ends if self._reaches(end, direction)]
            share = 1 / max(len(onward), sum(self._reaches(end, -direction) for end in ends), 1)
            given = share * (work - work.min())
            for end in onward:
                least = end.least(given)
                end.potentials += least
                work = work - least[end.layouts]
            self._work[decision] = work

    def _reaches(self, end: _End, direction: int) -> bool:
        """Whether other ends of the same shared work come later in a sweep."""
        turns = (direction * self._turn[other.decision] for other in end.place.ends)
        return max(turns) > direction * self._turn[end.decision]

    def decoded(self, forward: bool) -> list[int]:
        """An option for every decision, one after the other, given those before."""
        chosen = [0] * len(self._work)
        with self._kept():
            for decision in self._order if forward else self._order[::-1]:
                ends = self._ends[decision]
                messages = (end.place.message(end)[end.layouts] for end in ends)
                option = chosen[decision] = int(np.argmin(sum(messages, start=self._work[decision])))
                for end in ends:
                    layout = end.layouts[option]
                    only = np.full(len(end.potentials), np.inf)
                    only[layout] = end.potentials[layout]
                    end.potentials = only
        return chosen

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Gives all ends their potentials back."""
        kept = [(end, end.potentials) for shares in self._shares for end in shares.ends]
        yield
        for end, potentials in kept:
            end.potentials = potentials
