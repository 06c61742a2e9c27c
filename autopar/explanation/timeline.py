"""A predicted step as a timeline: lanes of compute and of every axis' communication.

The timeline is the step that `autopar.cost_model.steps.step` composes, drawn: it ends when the step does, its events on
the lane of compute add up to the compute of the step, and those on the lane of an axis to its communication. What the
step hides behind compute lies beside compute here: gathers of parameters beside what follows them (they are fetched
early), reductions of gradients beside what comes before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autopar.cost_model.breakdown import Event
from autopar.cost_model.items import COMPUTE, Phase, Region, WorkItem
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.cost_model.steps.run import REGIONS
from autopar.cost_model.steps.step import Step

SHOWN_MICRO_BATCHES = 2  # one by one; the rest is one event
_AT_THE_END = ("pipeline bubble", "stage boundaries", "optimizer", "fixed")


@dataclass(frozen=True)
class _Drawn:
    """Executions of an item in one phase: their seconds, those of them that hide, and what a reader is told."""

    item: WorkItem
    title: str
    seconds: float
    hidden_seconds: float
    detail: dict[str, object]

    @property
    def hides_early_or_late(self) -> bool:
        """Whether it is a gather of parameters or a reduction of gradients, some of which hides."""
        return self.item.carries in ("parameter", "gradient") and self.hidden_seconds > 0


@dataclass
class _Clock:
    now: float = 0.0
    events: list[Event] = field(default_factory=list)

    def at(self, start: float, lane: str, name: str, seconds: float, **detail: object) -> float:
        """Draws work that begins at `start`, or at 0; returns its end."""
        start = max(0.0, start)
        if seconds > 0:
            self.events.append(Event(lane, name, start, seconds, detail))
        return start + seconds

    def run(self, lane: str, name: str, seconds: float, **detail: object) -> None:
        """Draws work for which everything waits."""
        self.now = self.at(self.now, lane, name, seconds, **detail)

    def draw(self, found: Iterable[_Drawn]) -> None:
        """Draws the work of a phase, some of which hides."""
        works = list(found)
        kinds: dict[str, list[_Drawn]] = {"parameter": [], "gradient": [], "": []}
        for work in works:
            kinds[work.item.carries if work.hides_early_or_late else ""].append(work)
        gathers, reductions, others = kinds.values()
        begin, end = self.now, self.now + sum(w.seconds - w.hidden_seconds for w in works)
        early = min(begin, end - sum(w.seconds for w in gathers))
        for work in gathers:
            early = self._one(early, work)
        self.now += sum(w.seconds - w.hidden_seconds for w in gathers)
        for work in others:
            self._one(max(begin, self.now - work.hidden_seconds), work)
            self.now += work.seconds - work.hidden_seconds
        late = end - sum(w.seconds for w in reductions)
        for work in reductions:
            late = self._one(late, work)
        self.now = end

    def _one(self, start: float, work: _Drawn) -> float:
        return self.at(start, work.item.resource, work.title, work.seconds, **work.detail)


def timeline(step: Step) -> tuple[Event, ...]:
    """The events of a predicted step, on one rank; the last one ends when the step does.

    With pipeline stages, the rank is an imagined one: it has an equal share of the repeated layers, and of the other
    ops (before and after these layers) as much as the slowest stage. All repeated layers together are one event per
    kind of op. The first two micro-batches are shown; the rest is one event.
    """
    clock = _Clock()
    clock.draw(_once(step, "gather", 0.0))
    start, count = clock.now, int(step.run.micro_batches)
    shown = min(count, SHOWN_MICRO_BATCHES)
    for number in range(shown):
        _micro_batch(clock, step, number)
    each = (clock.now - start) / shown if shown else 0.0
    if count > shown:
        clock.run(COMPUTE, f"{count - shown} more micro-batches", each * (count - shown))
    terms = {term.name: float(term.value) for term in step.time()}
    clock.draw(_once(step, "reduce", -terms["reductions hidden behind backward"]))
    clock.draw(_once(step, "meet", 0.0))
    for name in _AT_THE_END:
        clock.run(COMPUTE, name, terms[name])
    return tuple(clock.events)


def _micro_batch(clock: _Clock, step: Step, number: int) -> None:
    again = float(step.recomputed_share)
    for region in REGIONS:
        clock.draw(_phase(step, region, "forward", number))
    for region in reversed(REGIONS):
        if again and region == "layers":
            clock.draw(_phase(step, region, "forward", number, recomputes=True))
        clock.draw(_phase(step, region, "backward", number))
        waits = float(step.waits(region)) * _share(step, region)
        clock.run(COMPUTE, "waiting for the host", waits, micro_batch=number)
    if isinstance(step, OwnedStep):
        waits = max(0.0, step.waits_for_owners)
        clock.run(COMPUTE, "waiting for other ranks", waits, micro_batch=number)


def _phase(step: Step, region: Region, phase: Phase, number: int, recomputes: bool = False) -> Iterator[_Drawn]:
    """The work of a micro-batch in one phase; a reduction once a micro-batch is part of backward."""
    found = [i for i in step.items if i.phase == phase and i.region == region]
    title = "recompute" if recomputes else phase
    if phase == "backward":
        found = [*reversed(found), *(i for i in step.items if _is_reduced_each_time(i, region))]
    for item in found:
        count = float(item.count) * _share(step, region) * _executions(step, item, recomputes)
        if count:
            yield _work(item, f"{item.name} {title}", count, float(step.hidden_seconds(item)), number)


def _is_reduced_each_time(item: WorkItem, region: Region) -> bool:
    return item.phase == "reduce" and item.every_micro_batch and item.region == region


def _share(step: Step, region: Region) -> float:
    """The share of a region's work that the rank has: all of it without stages."""
    if region == "layers" or step.run.stages == 1:
        return 1 / float(step.run.stages)
    before, _, after = (float(step.region_seconds(each)) for each in REGIONS)
    ends = next(t for t in step.time() if t.name == "embedding, head and loss").value
    return float(ends) / float(step.run.micro_batches) / (before + after) if before + after else 0.0


def _executions(step: Step, item: WorkItem, recomputes: bool) -> float:
    """Executions of an item by one phase of a micro-batch, as a mean over layers."""
    further = float(step.times(item)) - 1
    if recomputes:
        return further
    return 1.0 if item.phase == "forward" else 1 + further


def _once(step: Step, phase: Phase, hidden_seconds: float) -> Iterator[_Drawn]:
    """Work that runs once a step, of which `hidden_seconds` pass beside what runs before it."""
    found = [i for i in step.items if i.phase == phase and not i.every_micro_batch]
    counts = [float(i.count) * (1 / float(step.run.stages) if i.region == "layers" else 1) for i in found]
    whole = sum(c * float(i.seconds) for c, i in zip(counts, found, strict=True))
    share = hidden_seconds / whole if whole else 0.0
    for item, count in zip(found, counts, strict=True):
        yield _work(item, item.name, count, share * float(item.seconds))


def _work(item: WorkItem, title: str, count: float, hidden_seconds: float, number: int | None = None) -> _Drawn:
    detail: dict[str, object] = {"count": count, "traffic_bytes": count * float(item.traffic_bytes)}
    if item.flops:
        detail["flops"] = count * float(item.flops)
    if number is not None:
        detail["micro_batch"] = number
    return _Drawn(item, title, count * float(item.seconds), count * hidden_seconds, detail)
