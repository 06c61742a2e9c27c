"""A predicted step as a timeline: lanes of compute and of every axis' communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost_model.breakdown import Event
from autopar.cost_model.items import COMPUTE, Item, Phase, Region
from autopar.cost_model.run import REGIONS
from autopar.cost_model.step import Step

SHOWN_MICRO_BATCHES = 2  # one by one; the rest is one event


@dataclass
class _Clock:
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def run(self, lane: str, name: str, seconds: float, **detail: object) -> None:
        if seconds > 0:
            self.events.append(Event(lane, name, self.now, seconds, detail))
            self.now += seconds


def timeline(step: Step) -> tuple[Event, ...]:
    """The events of a predicted step, on one rank.

    Where there are pipeline stages, the rank is an imagined one: it has an equal share of the repeated
    layers and everything before and after them. All repeated layers together are one event per kind of
    op. The first two micro-batches are shown, the rest is one event. Everything is drawn in sequence, also
    communication that the cost model hides behind compute, so the timeline is longer than the step by
    what is hidden. A kernel is drawn at least as long as the host takes to issue it.
    """
    clock = _Clock()
    _once(clock, step, "gather")
    start, count = clock.now, int(step.run.micro_batches)
    shown = min(count, SHOWN_MICRO_BATCHES)
    for number in range(shown):
        _micro_batch(clock, step, number)
    each = (clock.now - start) / shown if shown else 0.0
    if count > shown:
        clock.run(COMPUTE, f"{count - shown} more micro-batches", each * (count - shown))
    _once(clock, step, "reduce")
    _once(clock, step, "meet")
    for term in step.time():
        if term.name in ("pipeline bubble", "stage boundaries", "optimizer", "fixed"):
            clock.run(COMPUTE, term.name, float(term.value))
    return tuple(clock.events)


def _micro_batch(clock: _Clock, step: Step, number: int) -> None:
    again = float(step.recomputed_share)
    for region in REGIONS:
        _phase(clock, step, region, "forward", number)
    for region in reversed(REGIONS):
        if again and region == "layers":
            _phase(clock, step, region, "forward", number, recomputes=True)
        _phase(clock, step, region, "backward", number)


def _phase(
    clock: _Clock, step: Step, region: Region, phase: Phase, number: int, recomputes: bool = False
) -> None:
    share = 1 / float(step.run.stages) if region == "layers" else 1.0
    found = [i for i in step.items if i.phase == phase and i.region == region]
    title = "recompute" if recomputes else phase
    for item in found if phase == "forward" else reversed(found):
        count = float(item.count) * share * _executions(step, item, recomputes)
        if not count:
            continue
        seconds = max(float(item.seconds), _issue_seconds(step, item))
        clock.run(
            item.resource, f"{item.name} {title}", count * seconds,
            **_detail(item, count), micro_batch=number,
        )  # fmt: skip


def _executions(step: Step, item: Item, recomputes: bool) -> float:
    """Executions of an item by one phase of a micro-batch, as a mean over layers."""
    further = float(step.times(item)) - 1
    if recomputes:
        return further
    return 1.0 if item.phase == "forward" else 1 + further


def _issue_seconds(step: Step, item: Item) -> float:
    """What the host takes for an item, where the device has to wait for it."""
    waits = item.kernels and not step.software.runs_ahead
    return float(step.issue_seconds(item)) if waits else 0.0


def _once(clock: _Clock, step: Step, phase: Phase) -> None:
    for item in _of_phase(step.items, phase):
        share = 1 / float(step.run.stages) if item.region == "layers" else 1.0
        times = float(step.run.micro_batches) if item.every_micro_batch else 1.0
        count = float(item.count) * share * times
        clock.run(item.resource, item.name, count * float(item.seconds), **_detail(item, count))


def _of_phase(items: Sequence[Item], phase: Phase) -> Iterator[Item]:
    return (item for item in items if item.phase == phase)


def _detail(item: Item, count: float) -> dict[str, object]:
    detail: dict[str, object] = {"count": count, "traffic_bytes": count * float(item.traffic_bytes)}
    if item.flops:
        detail["flops"] = count * float(item.flops)
    return detail
