"""A whole report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from autopar.units import printable
from autopar.views.bars import headline, memory_bar, time_bar
from autopar.views.gantt import Gantt
from autopar.views.page import Page
from autopar.views.stages import StageSummary
from autopar.views.tables import BatchTable, CandidateTable, SensitivityTable, Tree


class Screen(Console):
    """A console on which names are shown as they are: without rich's markup, and with escapes that can be read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The pieces to print."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=printable(piece.text))


def show(page: Page) -> RenderableType:
    """Headline, memory and time as bars, trees of both and of the traffic, and the comparisons."""
    sections = list(_sections(page))
    return Group(*(part for section in sections for part in (section, Text())))


def _sections(page: Page) -> Iterator[RenderableType]:
    yield headline(page)
    yield memory_bar(page.memory, page.memory_bound_bytes)
    yield time_bar(page.time, page.axes)
    if page.simulation is not None:
        yield Gantt(page.simulation)
        yield StageSummary(page.stages)
    for breakdown in (page.time, page.memory, page.traffic):
        if breakdown.parts:
            yield Tree(breakdown)
    if page.batches:
        yield BatchTable(page.batches)
    if page.candidates:
        yield CandidateTable(page.candidates)
    if page.sensitivity:
        yield SensitivityTable(page.sensitivity)
    if page.notes:
        yield Group(*(Text(f"- {note}") for note in page.notes))
