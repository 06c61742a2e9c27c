"""The joint problem of all axes of a mesh: which choices, on all of them at once, make up the best plan.

A *decision* has options: of a class of ops its choices on all axes, of a parameter with several uses the ways to store
it, of an input its layouts. Options have work of their own (`autopar.search.exact.work`). All other work is *shared*:
that of the conversions of an entry, or the bytes of a saved tensor. It depends on the layout in which one decision
leaves the tensor (the source) and on those in which others need it (the targets), of which distinct ones are paid once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Labels, Layout, ParameterPlan, R, State, TieredLayout
from autopar.search.exact.fold import SavedEntry
from autopar.search.exact.problem import Problem
from autopar.search.exact.work import Numbers, StepPieces

Places = NDArray[np.int64]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class End:
    """An end of shared work: a decision, and for every option the layout that it has there.

    Attributes:
        decision: index of the decision.
        layouts: option -> number of the layout.
    """

    decision: int
    layouts: Places


@dataclass
class Shared:
    """Work that depends on several decisions.

    Attributes:
        source: the decision that leaves the tensor in a layout.
        targets: the decisions that need it in a layout, each distinct layout of which is paid once.
        work: work of every source and target, of shape `(sources, targets, kinds of work)`.
    """

    source: End
    targets: list[End]
    work: Numbers


@dataclass
class LoneParameter:
    """A parameter with one use, which is stored in the best way for it.

    Attributes:
        use: the decision that uses the parameter.
        work: for every target layout, work of the ways to store the parameter, of shape
            `(ways, kinds of work)`.
    """

    use: End
    work: list[Numbers]


@dataclass
class JointProblem:
    """The joint problem of a search.

    Attributes:
        problem: the search's data for one mesh.
        pieces: the kinds of work.
        work: work of the options of every decision, of shape `(options, kinds of work)`.
        shared: work that depends on several decisions.
        lone: parameters with one use.
        leads: decision on a parameter or an input -> its first use.
    """

    problem: Problem
    pieces: StepPieces
    work: list[Numbers] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    lone: list[LoneParameter] = field(default_factory=list)
    leads: dict[int, int] = field(default_factory=dict)
    _labels: dict[int, list[Labels]] = field(default_factory=dict)
    _decisions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self._decide(1)  # what is given: buffers, and where saved tensors come from
        for index in problem.free:
            self._labels[index] = problem.joint_labels(index)
            self._decisions[index] = self._decide(len(self._labels[index]))
        for index, made in problem.collapsed.items():
            self._labels[index] = [problem.follow(index, each) for each in self._labels[made.index]]
            self._decisions[index] = self._decisions[made.index]
        for index, labels in self._labels.items():
            self.work[self._decisions[index]] += np.array([self._of_op(index, each) for each in labels])
        for index in problem.priced_entries:
            self._add_entry(index)
        for saved in problem.fold.saved:
            self._add_saved(saved)

    def work_of(self, chosen: Sequence[int], of_work: Numbers) -> Numbers:
        """The work of a plan: the option of every decision, and the ways to store that these multipliers make best."""
        found = sum((self.work[d][option] for d, option in enumerate(chosen)), start=np.zeros(self.pieces.size))
        for each in self.lone:
            ways = each.work[each.use.layouts[chosen[each.use.decision]]]
            found += ways[int((ways @ of_work).argmin())]
        for shared in self.shared:
            source = shared.source.layouts[chosen[shared.source.decision]]
            for target in {int(end.layouts[chosen[end.decision]]) for end in shared.targets}:
                found += shared.work[source, target]
        return found

    def _decide(self, options: int) -> int:
        self.work.append(np.zeros((options, self.pieces.size)))
        return len(self.work) - 1

    def _of_op(self, index: int, labels: Labels) -> Numbers:
        prices = self.problem.prices
        found = self.pieces.of(prices.op(index, labels))
        size_bytes = prices.working_bytes(index, labels)
        for block, counts in enumerate(prices.blocks) if size_bytes else ():
            found += self.pieces.moment(block, "working", counts.get(index, 0) * size_bytes)
        return found

    # Conversions

    def _add_entry(self, index: int) -> None:
        entry = self.problem.entries[index]
        needs = [(self._decisions[c], self._needed(c, position)) for c, position in entry.consumers]
        if entry.leaf == "parameter" and len(needs) == 1:
            self._add_lone(index, *needs[0])
            return
        decision, given = self._given(index, [layout for _, layouts in needs for layout in layouts])
        if entry.leaf in ("parameter", "input") and needs:
            self.leads[decision] = min(each for each, _ in needs)
        sources: dict[TieredLayout, int] = {}
        targets: dict[Layout, int] = {}
        source = End(decision, _numbered(given, sources))
        ends = [End(each, _numbered(layouts, targets)) for each, layouts in needs]
        work = np.array([[self._convert(index, s, t) for t in targets] for s in sources])
        for option, layout in enumerate(given if entry.is_output else ()):
            # What is delivered depends on the source alone, which pays for it; for other uses it is there.
            delivered = self.problem.graph.delivered(layout.layout)
            self.work[decision][option] += self._convert(index, layout, delivered)
            if delivered in targets:
                work[sources[layout], targets[delivered]] = 0.0
        self._share(Shared(source, ends, work))

    def _needed(self, index: int, position: int) -> list[Layout]:
        return [self.problem.layouts(index, each).operands[position] for each in self._labels[index]]

    def _given(self, index: int, needed: Sequence[Layout]) -> tuple[int, list[TieredLayout]]:
        """The decision on the layout of an entry, and the layout under each of its options."""
        problem, entry = self.problem, self.problem.entries[index]
        if entry.leaf == "parameter":
            ways = problem.ways(index)
            decision = self._decide(len(ways))
            self.work[decision] += np.array([self._stored(index, how) for how in ways])
            return decision, [how.in_use for how in ways]
        if entry.leaf == "input":
            layouts = {problem.whole: None}
            layouts |= {tuple(s if s.kind == "S" else R for s in layout): None for layout in needed}
            return self._decide(len(layouts)), [TieredLayout(each) for each in layouts]
        if entry.leaf == "buffer":
            return 0, [TieredLayout(problem.whole)]
        made = problem.made[index]
        results = (problem.layouts(made.index, each).results for each in self._labels[made.index])
        return self._decisions[made.index], [TieredLayout(made.layout(each)) for each in results]

    def _convert(self, index: int, source: TieredLayout, target: Layout) -> Numbers:
        problem, entry = self.problem, self.problem.entries[index]
        if entry.leaf == "parameter" and not problem.serves(index, source.layout, _states(target), mixed=True):
            return self.pieces.forbidden
        return entry.count * self.pieces.of(problem.prices.conversion(index, source, target))

    def _stored(self, index: int, how: ParameterPlan) -> Numbers:
        items, holdings = self.problem.prices.parameters(index, how)
        return self.pieces.of(items) + self.pieces.stored(self.problem.prices.optimizer_seconds(holdings), holdings)

    def _add_lone(self, index: int, decision: int, needed: Sequence[Layout]) -> None:
        targets: dict[Layout, int] = {}
        use = End(decision, _numbered(needed, targets))
        ways = [(how, self._stored(index, how)) for how in self.problem.ways(index)]
        work = []
        for target in dict.fromkeys(needed):
            serving = [each for each in ways if self.problem.serves(index, each[0].resident, _states(target))]
            used = [stored + self._used(index, how.in_use, target) for how, stored in serving]
            work.append(np.array(used or [self.pieces.forbidden]))
        self.lone.append(LoneParameter(use, work))

    def _used(self, index: int, source: TieredLayout, target: Layout) -> Numbers:
        """The work of the only use of a parameter, and what it gathers with the gradient of that."""
        prices = self.problem.prices
        found = self._convert(index, source, target)
        size_bytes = 2 * prices.gathered_bytes(index, source, target)
        for block, count in prices.blocks_using(index).items() if size_bytes else ():
            found = found + self.pieces.moment(block, "gathered", count * size_bytes)
        return found

    # Memory

    def _add_saved(self, entry: SavedEntry) -> None:
        problem, memories = self.problem, dict[tuple[str, Layout], int]()
        ends: dict[tuple[int, bytes], End] = {}
        sizes: dict[int, int] = {}
        for index, position, name in entry.savers:
            at = (problem.layouts(index, each) for each in self._labels[index])
            kept = [problem.saved.memory(name, (*each.operands, *each.results)[position]) for each in at]
            end = End(self._decisions[index], _numbered(kept, memories))
            ends[end.decision, end.layouts.tobytes()] = end
            sizes |= {memories[each]: problem.bytes(*each) for each in kept}
        work = np.array([[self.pieces.saved(float(entry.count * sizes[n])) for n in range(len(memories))]])
        self._share(Shared(End(0, np.zeros(1, int)), list(ends.values()), work))

    def _share(self, shared: Shared) -> None:
        if len(shared.work) == 1 and len(shared.targets) == 1:
            (end,) = shared.targets
            self.work[end.decision] += shared.work[0, end.layouts]
        elif shared.targets and shared.work.any():
            self.shared.append(shared)


def _states(layout: Layout) -> list[frozenset[State]]:
    return [frozenset({state}) for state in layout]


def _numbered(layouts: Iterable[_Key], known: dict[_Key, int]) -> Places:
    """The number of every layout; new ones are numbered in order."""
    return np.array([known.setdefault(each, len(known)) for each in layouts])
