"""A step of a pipeline, action by action: when each runs, where ranks idle, and what they hold.

The actions are those of `schedules.actions`, each rank's in its order. A rank computes one action at a
time. A send occupies the link between two ranks in one direction, one after the other and beside
compute; an action that needs what is received begins when that has arrived. Memory of a micro-batch is
held from its forward until its backward; where the backward is split, a part of it until the weights'
gradients are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.pipeline.schedules import Action, Actions, Kind, in_order, ranks_of


@dataclass(frozen=True)
class StageCosts:
    """What a stage costs on its rank, for one micro-batch where nothing else is said.

    Attributes:
        forward_seconds: duration of a forward.
        backward_seconds: duration of a whole backward, recomputation included.
        weight_seconds: the share of `backward_seconds` that makes the gradients of the weights, where a
            schedule splits the backward. Torch does not split that of stage 0, whose input needs no
            gradient: all of it is done there (`PipelineStage.backward_one_chunk`).
        saved_bytes: held from the forward until the backward.
        weight_saved_bytes: the share of `saved_bytes` that a split backward holds until the weights'
            gradients are made; None for all of it.
        working_bytes: held besides while the stage computes.
        kept_bytes: held in all of the step, such as parameters and gradients.
        send_forward_seconds: duration of sending its output to the next stage.
        send_backward_seconds: duration of sending the gradient of its input to the previous stage.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    saved_bytes: float = 0
    weight_saved_bytes: float | None = None
    working_bytes: float = 0
    kept_bytes: float = 0
    send_forward_seconds: float = 0.0
    send_backward_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.weight_seconds <= self.backward_seconds, (
            f"a part of the backward takes {self.weight_seconds} s, and all of it {self.backward_seconds} s"
        )

    @property
    def seconds(self) -> Mapping[Kind, float]:
        """How long an action takes: of the rank, or of a link for a send."""
        return {
            "F": self.forward_seconds,
            "B": self.backward_seconds,
            "I": self.backward_seconds - self.weight_seconds,
            "W": self.weight_seconds,
            "SEND_F": self.send_forward_seconds,
            "SEND_B": self.send_backward_seconds,
        }

    @property
    def grown_bytes(self) -> Mapping[Kind, float]:
        """How much more is held from an action on; what is let go is negative."""
        late = self.saved_bytes if self.weight_saved_bytes is None else self.weight_saved_bytes
        return {
            "F": self.saved_bytes,
            "B": -self.saved_bytes,
            "I": late - self.saved_bytes,
            "W": -late,
        }


class Span(NamedTuple):
    """Something that takes time on a rank, or for a send on the link from it."""

    rank: int
    stage: int
    micro_batch: int
    kind: Kind
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """A step of a pipeline; sequences have one entry a rank.

    Attributes:
        step_seconds: from the first forward to the last backward or arrival.
        busy_seconds: time during which the rank computes.
        peak_bytes: the most that the rank holds at once.
        peak_seconds: when it first holds that.
        spans: what takes time, sends included, in an order of execution.
    """

    step_seconds: float
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    peak_seconds: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def ranks(self) -> int:
        return len(self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """Seconds in which a rank idles, on average."""
        return self.step_seconds - sum(self.busy_seconds) / self.ranks

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all ranks' time."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0


def simulate(
    actions: Actions, costs: Sequence[StageCosts], *, waits_for_sends: bool = False
) -> Simulation:
    """Runs the actions of all ranks.

    Args:
        actions: actions of every rank, as `schedules.actions` gives them.
        costs: durations of every stage.
        waits_for_sends: whether a rank goes on only when what it sends has arrived, see
            `schedules.waits_for_sends`.
    """
    rank_of = ranks_of(actions)
    assert sorted(rank_of) == list(range(len(costs))), (
        f"{len(costs)} costs are given for the stages {sorted(rank_of)}"
    )
    run = _Run(costs, rank_of, len(actions), waits_for_sends)
    for action in in_order(actions):
        run.do(action)
    return run.result()


@dataclass
class _Rank:
    """A rank while it runs: when it is free, how long it has computed, what it holds and held at most."""

    held_bytes: float
    peak_bytes: float
    peak_at: float = 0.0
    free_at: float = 0.0
    busy: float = 0.0


# A send's direction, and where the stage lies to which it goes; which direction an action waits for.
_SENDS: Mapping[Kind, tuple[str, int]] = {"SEND_F": ("forward", 1), "SEND_B": ("backward", -1)}
_COMPUTES: Mapping[Kind, str] = {"F": "forward", "B": "backward", "I": "backward", "W": ""}


class _Run:
    """A step while it runs. Receives take no time: the action that needs what they bring waits for it."""

    def __init__(
        self,
        costs: Sequence[StageCosts],
        rank_of: Mapping[int, int],
        ranks: int,
        waits_for_sends: bool,
    ) -> None:
        self.rank_of, self.costs, self.waits_for_sends = rank_of, costs, waits_for_sends
        self.seconds = [cost.seconds for cost in costs]
        self.grown_bytes = [cost.grown_bytes for cost in costs]
        kept = [0.0] * ranks
        for stage, cost in enumerate(costs):
            kept[rank_of[stage]] += cost.kept_bytes
        self.ranks = [_Rank(held_bytes=each, peak_bytes=each) for each in kept]
        self.links: dict[tuple[int, int], float] = {}  # (from, to) -> when it is free
        self.arrivals: dict[tuple[str, int, int], float] = {}
        self.spans: list[Span] = []

    def do(self, action: Action) -> None:
        if action.kind in _COMPUTES:
            self._compute(action)
        elif action.kind in _SENDS:
            self._send(action)

    def _compute(self, action: Action) -> None:
        kind, stage, number = action
        rank = self.ranks[self.rank_of[stage]]
        begin = max(rank.free_at, self.arrivals.get((_COMPUTES[kind], stage, number), 0.0))
        grown = self.grown_bytes[stage][kind]
        most = rank.held_bytes + max(grown, 0.0) + self.costs[stage].working_bytes
        if most > rank.peak_bytes:
            rank.peak_bytes, rank.peak_at = most, begin
        rank.held_bytes += grown
        rank.busy += self.seconds[stage][kind]
        rank.free_at = self._span(action, begin)

    def _send(self, action: Action) -> None:
        kind, stage, number = action
        direction, offset = _SENDS[kind]
        link = self.rank_of[stage], self.rank_of[stage + offset]
        begin = max(self.ranks[link[0]].free_at, self.links.get(link, 0.0))
        end = self._span(action, begin)
        self.links[link] = self.arrivals[direction, stage + offset, number] = end
        if self.waits_for_sends:
            self.ranks[link[0]].free_at = end

    def _span(self, action: Action, begin: float) -> float:
        """Notes an action that takes time, and returns its end."""
        kind, stage, number = action
        end = begin + self.seconds[stage][kind]
        if end > begin:
            self.spans.append(Span(self.rank_of[stage], stage, number, kind, begin, end))
        return end

    def result(self) -> Simulation:
        ends = (*(rank.free_at for rank in self.ranks), *self.links.values())
        return Simulation(
            step_seconds=max(ends),
            busy_seconds=tuple(rank.busy for rank in self.ranks),
            peak_bytes=tuple(rank.peak_bytes for rank in self.ranks),
            peak_seconds=tuple(rank.peak_at for rank in self.ranks),
            spans=tuple(self.spans),
        )
