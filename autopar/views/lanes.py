"""Events in rows: overlapping events of a lane get separate rows, and time hidden behind compute is marked."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cost_model.breakdown import Event

COMPUTE = "compute"
_TOUCHING_SECONDS = 1e-9  # events that meet may overlap by a rounding of their sums


@dataclass(frozen=True)
class LaneRow:
    """Events that do not overlap.

    Attributes:
        lane: name of the lane.
        index: position of the row within its lane; the first is 0.
        events: the events, sorted by start.
    """

    lane: str
    index: int
    events: tuple[Event, ...]

    @property
    def name(self) -> str:
        return f"{self.lane} ({self.index + 1})" if self.index else self.lane


def rows(events: Iterable[Event]) -> tuple[LaneRow, ...]:
    """All events in as few rows as hold them; compute first, then lanes by their first event."""
    lanes: dict[str, list[list[Event]]] = {COMPUTE: []}
    for event in sorted(events, key=lambda e: (e.start_seconds, -e.duration_seconds)):
        _place(lanes.setdefault(event.lane, []), event)
    return tuple(LaneRow(lane, index, tuple(row)) for lane, found in lanes.items() for index, row in enumerate(found))


def _place(found: list[list[Event]], event: Event) -> None:
    for row in found:
        if end(row[-1]) <= event.start_seconds + _TOUCHING_SECONDS:
            row.append(event)
            return
    found.append([event])


def end(event: Event) -> float:
    """Time at which an event ends, in seconds from the start of the step."""
    return event.start_seconds + event.duration_seconds


Span = tuple[float, float]  # start and end, in seconds


def busy(events: Iterable[Event]) -> tuple[Span, ...]:
    """The union of the events' spans, in order."""
    spans: list[Span] = []
    for event in sorted(events, key=lambda e: e.start_seconds):
        start, stop = event.start_seconds, end(event)
        if spans and start <= spans[-1][1] + _TOUCHING_SECONDS:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return tuple(spans)


def exposed(span: Span, compute: Sequence[Span]) -> tuple[Span, ...]:
    """The parts of a span in which compute is idle; `compute` is in order and disjoint."""
    gaps = []
    start, stop = span
    first = bisect.bisect_right(compute, start, key=lambda each: each[1])
    for low, high in itertools.islice(compute, first, None):
        if low >= stop:
            break
        if low > start:
            gaps.append((start, low))
        start = max(start, high)
    if start < stop:
        gaps.append((start, stop))
    return tuple(gap for gap in gaps if gap[1] - gap[0] > _TOUCHING_SECONDS)
