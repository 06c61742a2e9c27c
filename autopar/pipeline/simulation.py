"""Simulates the schedule of a pipeline: when every action runs, how long ranks idle, and how much memory they hold.

Each rank computes its actions (`schedules.actions`) one at a time, in order. Sends between two ranks in one direction
run one after the other, and overlap with compute. An action that needs a received tensor begins when it has arrived.
The activations of a micro-batch are held from its forward until its backward. Between the two halves of a split
backward, a stage holds what the second half needs: activations, and gradients of results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.pipeline.schedules import ActionLists, Actions, Kind, Timed

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "U", "SEND_F", "SEND_B")
_Run = tuple[int, int, int, int]  # rank, index of the duration, arrival, link (-1 for none)


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of a stage on its rank, for one micro-batch unless an attribute says otherwise.

    Attributes:
        forward_seconds: duration of a forward.
        backward_seconds: duration of a whole backward, recomputation included.
        weight_seconds: duration of the second half of a backward in two halves, which computes gradients of weights.
        saved_bytes: bytes of the activations saved from the forward until the backward.
        late_bytes: bytes held between the two halves of a backward; None for as many as `saved_bytes`.
        working_bytes: further bytes while the stage computes.
        kept_bytes: bytes held during the whole step, such as parameters and gradients.
        version_bytes: bytes of one more version of the stage's parameters, see `versions.with_versions`.
        update_seconds: duration of an update, if the schedule has updates inside of a step.
        send_forward_seconds: duration of sending the stage's output to the next stage.
        send_backward_seconds: duration of sending the gradient of the stage's input to the previous stage.
        split_seconds: duration of both halves of a backward together, beyond that of a whole one.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    saved_bytes: float = 0
    late_bytes: float | None = None
    working_bytes: float = 0
    kept_bytes: float = 0
    version_bytes: float = 0
    update_seconds: float = 0.0
    send_forward_seconds: float = 0.0
    send_backward_seconds: float = 0.0
    split_seconds: float = 0.0

    def __post_init__(self) -> None:
        halves = self.backward_seconds + self.split_seconds
        assert self.weight_seconds <= halves, (
            f"one half of the backward takes {self.weight_seconds} s, and both together {halves} s"
        )

    @property
    def seconds(self) -> Mapping[Kind, float]:
        """Kind of an action -> its duration on the rank, or on the link for a send."""
        return {
            "F": self.forward_seconds,
            "B": self.backward_seconds,
            "I": self.backward_seconds + self.split_seconds - self.weight_seconds,
            "W": self.weight_seconds,
            "U": self.update_seconds,
            "SEND_F": self.send_forward_seconds,
            "SEND_B": self.send_backward_seconds,
        }

    @property
    def grown_bytes(self) -> Mapping[Kind, float]:
        """Kind of an action -> bytes that the rank holds more after it; negative if the action frees memory."""
        late = self.saved_bytes if self.late_bytes is None else self.late_bytes
        return {"F": self.saved_bytes, "B": -self.saved_bytes, "I": late - self.saved_bytes, "W": -late, "U": 0.0}


class Span(NamedTuple):
    """A time span of an action on a rank; for a send, on the link from this rank."""

    rank: int
    stage: int
    micro_batch: int
    kind: Kind
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step of a pipeline.

    Attributes:
        step_seconds: time from the first forward to the last backward or arrival.
        busy_seconds: for every rank, the time during which it computes.
        peak_bytes: for every rank, its peak memory.
        peak_seconds: for every rank, the time at which it first reaches its peak memory.
        timed: computations and sends, in an order of execution.
        times: for each of them, the times at which it begins and ends.
    """

    step_seconds: float
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    peak_seconds: tuple[float, ...]
    timed: tuple[Timed, ...] = field(repr=False)
    times: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def ranks(self) -> int:
        return len(self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """Seconds in which a rank idles, on average."""
        return self.step_seconds - sum(self.busy_seconds) / self.ranks

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the step during which a rank idles, on average."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The time spans of all computations and sends, in an order of execution."""
        return tuple(
            Span(each.rank, each.action.stage, each.action.micro_batch, each.action.kind, *when)
            for each, when in zip(self.timed, self.times, strict=True)
            if when[1] > when[0]
        )


def simulate(actions: Actions, costs: Sequence[StageCosts], *, waits_for_sends: bool = False) -> Simulation:
    """Simulates the actions of all ranks.

    Args:
        actions: actions of every rank, as `schedules.actions` gives them.
        costs: time and memory of every stage.
        waits_for_sends: whether a rank waits until each tensor that it sends has arrived, see
            `schedules.waits_for_sends`.
    """
    lists = ActionLists.of(actions)
    assert sorted(lists.rank_of) == list(range(len(costs))), (
        f"{len(costs)} costs are given for the stages {sorted(lists.rank_of)}"
    )
    ranks = _ranks(lists, costs)
    links, times = _run(lists.timed, ranks, costs, waits_for_sends)
    return Simulation(
        step_seconds=max(0.0, *(rank.free_at for rank in ranks), *links),
        busy_seconds=tuple(rank.busy for rank in ranks),
        peak_bytes=tuple(rank.peak_bytes for rank in ranks),
        peak_seconds=tuple(rank.peak_at for rank in ranks),
        timed=lists.timed,
        times=times,
    )


@dataclass(slots=True)
class _Rank:
    """The state of a rank in a simulation: when it is free, how long it has computed, its memory and peak memory."""

    held_bytes: float
    peak_bytes: float
    peak_at: float = 0.0
    free_at: float = 0.0
    busy: float = 0.0


def _ranks(lists: ActionLists, costs: Sequence[StageCosts]) -> list[_Rank]:
    """All ranks before the step, with what their stages keep."""
    kept = [0.0] * len(lists)
    for stage, cost in enumerate(costs):
        kept[lists.rank_of[stage]] += cost.kept_bytes
    return [_Rank(held_bytes=each, peak_bytes=each) for each in kept]


def _run(
    timed: Sequence[Timed], ranks: Sequence[_Rank], costs: Sequence[StageCosts], waits: bool
) -> tuple[Iterable[float], tuple[tuple[float, float], ...]]:
    """Runs a step on its ranks; one loop, because a search runs hundreds of steps of 30,000 actions.

    Returns:
        Seconds at which every link is free at last, and at which every action begins and ends.
    """
    all_seconds = [cost.seconds for cost in costs]
    all_grown = [cost.grown_bytes for cost in costs]
    working = [cost.working_bytes for cost in costs]
    links: dict[tuple[int, int], float] = {}  # (from, to) -> when it is free
    arrivals = [0.0] * (1 + max((each.arrival for each in timed), default=0))
    times = []
    for (kind, stage, _), number, arrival, link in timed:
        rank = ranks[number]
        begin, seconds = rank.free_at, all_seconds[stage][kind]
        if link is not None:
            begin = max(begin, links.get(link, 0.0))
            end = links[link] = arrivals[arrival] = begin + seconds
            if waits:
                rank.free_at = end
        else:
            begin = max(begin, arrivals[arrival])
            end = rank.free_at = begin + seconds
            grown = all_grown[stage][kind]
            most = rank.held_bytes + max(grown, 0.0) + working[stage]
            if most > rank.peak_bytes:
                rank.peak_bytes, rank.peak_at = most, begin
            rank.held_bytes += grown
            rank.busy += seconds
        times.append((begin, end))
    return links.values(), tuple(times)


@dataclass(frozen=True)
class StepTimer:
    """A schedule whose step is timed for many costs of its stages, without the times of its actions and without memory.

    A search that moves cuts times one schedule thousands of times, and compares nothing but the seconds of the step.

    Attributes:
        runs: computations and sends in an order of execution.
        ranks, arrivals, links: numbers of ranks, of arrivals with that of none, and of links.
        waits_for_sends: whether a rank waits until each tensor that it sends has arrived.
    """

    runs: tuple[_Run, ...]
    ranks: int
    arrivals: int
    links: int
    waits_for_sends: bool

    @classmethod
    def of(cls, actions: Actions, *, waits_for_sends: bool) -> StepTimer:
        """A timer of these actions, with the arguments of `simulate`."""
        lists = ActionLists.of(actions)
        links: dict[tuple[int, int] | None, int] = {None: -1}
        runs = []
        for (kind, stage, _), rank, arrival, link in lists.timed:
            number = links.setdefault(link, len(links) - 1)
            runs.append((rank, stage * len(_KINDS) + _KINDS.index(kind), arrival, number))
        arrivals = 1 + max((arrival for _, _, arrival, _ in runs), default=0)
        return cls(tuple(runs), len(lists), arrivals, len(links) - 1, waits_for_sends)

    def seconds(self, costs: Sequence[StageCosts]) -> float:
        """Seconds of a step, to the last bit those of `simulate`."""
        durations = [of_kind[kind] for of_kind in (each.seconds for each in costs) for kind in _KINDS]
        free, arrived, links = [0.0] * self.ranks, [0.0] * self.arrivals, [0.0] * self.links
        waits = self.waits_for_sends
        for rank, duration, arrival, link in self.runs:
            begin = free[rank]
            if link < 0:
                at = arrived[arrival]
                free[rank] = (at if at > begin else begin) + durations[duration]
                continue
            at = links[link]
            end = (at if at > begin else begin) + durations[duration]
            links[link] = arrived[arrival] = end
            if waits:
                free[rank] = end
        return max(0.0, *free, *links)
