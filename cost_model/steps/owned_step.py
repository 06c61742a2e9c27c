"""The step of a plan in which single ranks of an axis run ops (choices such as `@1`): ranks work side by side.

Every rank runs its part of the calls in the program's order, so that the calls are scheduled as a list in which ranks
are the resources (Graham, Bounds on multiprocessing timing anomalies, 1969). A call begins when its ranks have run all
calls before it:

    op of all ranks     every rank for itself
    op of rank i        rank i alone; the other ranks go on
    collective          all ranks of its axis together, once the last of them has come
    send from i to j    the ranks i and j

A micro-batch takes as long as the last rank does. So two branches on two ranks cost what the longer one does, and a
chain of ops on different ranks costs the sum, with what it sends. Everything else is that of
`autopar.cost_model.steps.step`.

The memory is that of the fullest rank, and the optimizer's time that of the rank that updates longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from autopar.cost_model.items import COMPUTE, MemoryItem, WorkItem, runs_every_time
from autopar.cost_model.steps.run import REGIONS, Term
from autopar.cost_model.steps.step import Step

Position = tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The calls of one micro-batch on all ranks.

    Attributes:
        makespan_seconds: duration until the last rank has ended.
        busy_seconds: mesh coordinates of a rank -> duration of its calls.
        waits_seconds: mesh coordinates of two ranks -> duration for which the first waits for the second.
    """

    makespan_seconds: float
    busy_seconds: Mapping[Position, float]
    waits_seconds: Mapping[tuple[Position, Position], float]


@dataclass
class OwnedStep(Step):
    """Time and memory of a step in which single ranks run ops, in numbers.

    Attributes:
        order: work of a micro-batch in the order of the program.
        ranks: mesh coordinates of a rank -> its part of the step. Along axes without owners all ranks are alike, and
            the coordinate is 0.
        axis_names: names of the mesh axes.
    """

    axis_names: tuple[str, ...] = ()
    order: Sequence[WorkItem] = ()
    ranks: Mapping[Position, Step] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: Step,
        axis_names: tuple[str, ...],
        order: Sequence[WorkItem],
        holdings: Mapping[Position, Sequence[MemoryItem]],
    ) -> OwnedStep:
        """The step with the memory of its fullest rank.

        Args:
            step: the step with the work of all ranks.
            axis_names: names of the mesh axes.
            order: work of a micro-batch in the order of the program.
            holdings: mesh coordinates of every rank -> its memory.
        """
        ranks = {
            position: replace(step, items=[i for i in step.items if i.runs_at(position)], holdings=held, _sums={})
            for position, held in holdings.items()
        }
        fullest = max(ranks.values(), key=lambda rank: float(rank.peak_bytes()))
        given = {each.name: getattr(step, each.name) for each in fields(step)}
        given |= {"holdings": fullest.holdings, "_sums": {}}
        return cls(**given, axis_names=axis_names, order=order, ranks=ranks)

    def time(self) -> tuple[Term, ...]:
        """The seconds of a step, by parts; one part is the time saved by ranks that work at the same time."""
        note = "work of single ranks that overlaps with that of others, less their waits"
        return *super().time(), Term("owners side by side", self.run.micro_batches * self.waits_for_owners, note=note)

    @cached_property
    def waits_for_owners(self) -> float:
        """Seconds that a micro-batch takes beyond all its work in turn; less than 0 where ranks work side by side."""
        everything = sum(float(self.region_seconds(region)) for region in REGIONS)
        return self.schedule.makespan_seconds - self._hidden_seconds - everything

    def hidden_seconds(self, item: WorkItem) -> float:
        """Overrides `Step.hidden_seconds`: work on single ranks is hidden as far as it runs while others work."""
        if not item.places:
            return float(super().hidden_seconds(item))
        return float(item.seconds) * min(1.0, max(0.0, -self.waits_for_owners) / self._alone_seconds)

    @cached_property
    def _alone_seconds(self) -> float:
        """Seconds of a micro-batch's work that single ranks do, one after the other."""
        return sum(float(self.times(i) * i.count * i.seconds) for i in self.items if i.places and runs_every_time(i))

    @property
    def _hidden_seconds(self) -> float:
        """Seconds of communication that overlap with compute on every rank; none where the host is late."""
        return min(sum(float(rank._hidden(r)) for r in REGIONS if not rank.is_late(r)) for rank in self.ranks.values())

    def _optimizer_seconds(self) -> float:
        return max(float(rank._optimizer_seconds()) for rank in self.ranks.values())

    def backward_seconds(self) -> float:
        """Seconds of compute in a micro-batch's backward on the rank with the least of it."""
        return min(float(rank.backward_seconds()) for rank in self.ranks.values())

    @cached_property
    def schedule(self) -> Schedule:
        """The calls of one micro-batch on all ranks."""
        return self.scheduled(self.order)

    def in_turn_seconds(self, order: Sequence[WorkItem]) -> float:
        """Duration of some calls if all ranks take them one after the other."""
        return sum(max(self._duration(item, at) for at in self.ranks if item.runs_at(at)) for item in order)

    def scheduled(self, order: Sequence[WorkItem]) -> Schedule:
        """Some calls of a micro-batch on all ranks, which begin together."""
        clocks = _Clocks(dict.fromkeys(self.ranks, 0.0), {}, {})
        for item in order:
            at = [position for position in self.ranks if item.runs_at(position)]
            seconds = {position: self._duration(item, position) for position in at}
            if item.resource == COMPUTE:
                for position in at:
                    clocks.run([position], seconds[position])
            else:
                for together in _groups(at, self._axis(item)):
                    clocks.run(together, max(seconds[position] for position in together))
        clocks.meet(list(self.ranks))
        return Schedule(max(clocks.now.values()), clocks.busy_seconds, clocks.waits_seconds)

    def _axis(self, item: WorkItem) -> int | None:
        """Index of the axis along which a collective runs; None for a move between memories of one rank."""
        return self.axis_names.index(item.resource) if item.resource in self.axis_names else None

    def _duration(self, item: WorkItem, position: Position) -> float:
        """Seconds of an item on a rank, which are those of its launch where the host is the slower of the two."""
        rank = self.ranks[position]
        seconds, issued = float(item.seconds), float(rank.issue_seconds(item))
        waits = item.kernels and not self.software.runs_ahead
        one = max(seconds, issued) if waits else seconds
        if self._late[position, item.region]:
            one = issued
        return float(rank.times(item) * item.count) * one

    @cached_property
    def _late(self) -> Mapping[tuple[Position, str], bool]:
        return {(p, region): rank.is_late(region) for p, rank in self.ranks.items() for region in REGIONS}


@dataclass
class _Clocks:
    """The time at which every rank is free, and for how long it has worked and waited."""

    now: dict[Position, float]
    busy_seconds: dict[Position, float]
    waits_seconds: dict[tuple[Position, Position], float]

    def run(self, ranks: Sequence[Position], seconds: float) -> None:
        """Runs a call on some ranks together, once the last of them is free."""
        start = self.meet(ranks)
        for rank in ranks:
            self.now[rank] = start + seconds
            self.busy_seconds[rank] = self.busy_seconds.get(rank, 0.0) + seconds

    def meet(self, ranks: Sequence[Position]) -> float:
        """Lets ranks wait for the last of them, and returns the time."""
        last = max(ranks, key=self.now.__getitem__)
        for rank in ranks:
            waited = self.now[last] - self.now[rank]
            if waited:
                self.waits_seconds[rank, last] = self.waits_seconds.get((rank, last), 0.0) + waited
            self.now[rank] = self.now[last]
        return self.now[last]


def _groups(positions: Sequence[Position], axis: int | None) -> list[list[Position]]:
    """The positions in groups that differ along one axis alone; each by itself without an axis."""
    found: dict[Position, list[Position]] = {}
    for position in positions:
        own = position if axis is None else (*position[:axis], -1, *position[axis + 1 :])
        found.setdefault(own, []).append(position)
    return list(found.values())
