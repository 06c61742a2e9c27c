"""The seconds of a schedule for many costs of its stages: the simulation of `simulation`, without times and memory.

A search that moves cuts simulates one schedule thousands of times, and compares nothing but the seconds of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.pipeline.schedules import ActionLists, Actions, Kind
from autopar.pipeline.simulation import StageCosts

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "U", "SEND_F", "SEND_B")
_Run = tuple[int, int, int, int]  # rank, index of the duration, arrival, link (-1 for none)


@dataclass(frozen=True)
class StepTimer:
    """A schedule that is ready to be timed.

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
        """A timer of these actions, with the arguments of `simulation.simulate`."""
        lists = ActionLists.of(actions)
        links: dict[tuple[int, int] | None, int] = {None: -1}
        runs = []
        for (kind, stage, _), rank, arrival, link in lists.timed:
            number = links.setdefault(link, len(links) - 1)
            runs.append((rank, stage * len(_KINDS) + _KINDS.index(kind), arrival, number))
        arrivals = 1 + max((arrival for _, _, arrival, _ in runs), default=0)
        return cls(tuple(runs), len(lists), arrivals, len(links) - 1, waits_for_sends)

    def seconds(self, costs: Sequence[StageCosts]) -> float:
        """Seconds of a step, to the last bit those of `simulation.simulate`."""
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
