"""Stacked bars for a terminal; without colours, the parts have different patterns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from autopar import units
from autopar.cost_model.breakdown import Breakdown
from autopar.views import palette
from autopar.views.page import Page
from autopar.views.palette import Colour

FREE = ("·", ".")
BOUND = ("┃", "|")


@dataclass(frozen=True)
class StackedBar:
    """Values laid end to end over the whole width.

    Attributes:
        parts: (value, colour) pairs, left to right; none negative.
        bound: value at which a line is drawn, in the unit of the parts; None for no line.
    """

    parts: tuple[tuple[float, Colour], ...]
    bound: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = options.ascii_only
        for glyph, style in self._cells(options.max_width, ascii_only):
            yield Segment(glyph, style)
        yield Segment.line()

    def _cells(self, width: int, ascii_only: bool) -> Iterator[tuple[str, Style | None]]:
        total = sum(value for value, _ in self.parts)
        whole = max(total, self.bound or 0.0)
        cells: list[tuple[str, Style | None]] = [(FREE[ascii_only], Style(dim=True))] * width
        ends = _ends([value for value, _ in self.parts], whole, width)
        for (start, stop), (_, colour) in zip(ends, self.parts, strict=True):
            glyph = colour.ascii_glyph if ascii_only else colour.glyph
            cells[start:stop] = [(glyph, Style(color=colour.terminal))] * (stop - start)
        if self.bound is not None and whole > 0:
            at = min(width - 1, round(width * self.bound / whole))
            cells[at] = (BOUND[ascii_only], Style(bold=True))
        return iter(cells)


def _ends(values: Sequence[float], whole: float, width: int) -> list[tuple[int, int]]:
    """First and last cell of every value; running sums are rounded, so that errors do not add up."""
    ends, reached = [], 0.0
    for value in values:
        start = reached
        reached += value / whole if whole > 0 else 0.0
        ends.append((round(start * width), round(reached * width)))
    return ends


def legend(parts: Sequence[Breakdown], colours: dict[str, Colour], whole: float) -> RenderableType:
    """The parts of a bar with their numbers, shares and notes."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify=justify)
    for part in parts:
        table.add_row(
            _Glyph(colours[part.name]) if part.name in colours else "",
            Text(part.name),
            units.format_as(part.unit, part.value),
            units.format_share(part.value, whole),
            Text(part.note, style="dim"),
        )
    return table


@dataclass(frozen=True)
class _Glyph:
    colour: Colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyph = self.colour.ascii_glyph if options.ascii_only else self.colour.glyph
        yield Text(glyph * 2, style=self.colour.terminal)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(2, 2)


def memory_bar(memory: Breakdown, bound_bytes: float) -> RenderableType:
    """The memory of a rank by kind, and the bound it must stay under."""
    parts = shown(memory)
    colours = palette.in_order(part.name for part in parts)
    bar = StackedBar(tuple((p.value, colours[p.name]) for p in parts), bound_bytes)
    return Group(
        _heading("Memory of a rank", memory_headline(memory, bound_bytes)), bar, legend(parts, colours, memory.value)
    )


def memory_headline(memory: Breakdown, bound_bytes: float) -> str:
    """Words such as `63.1 GB of 80.0 GB, 16.9 GB free`, or how much memory is missing."""
    margin = bound_bytes - memory.value
    rest = f"{units.format_bytes(abs(margin))} {'free' if margin >= 0 else 'TOO MUCH'}"
    return f"{units.format_as(memory.unit, memory.value)} of {units.format_bytes(bound_bytes)}, {rest}"


def time_bar(time: Breakdown, axes: Iterable[str] = ()) -> RenderableType:
    """The time of a step as a bar, by cause."""
    parts = shown(time)
    colours = palette.with_axes((part.name for part in parts), palette.of_axes(axes))
    bound = time.value if savings(time) else None
    bar = StackedBar(tuple((p.value, colours[p.name]) for p in parts), bound)
    return Group(
        _heading("Time of a step", time_headline(time)), bar, legend((*parts, *savings(time)), colours, time.value)
    )


def time_headline(time: Breakdown) -> str:
    """Words for the time, and for hidden communication, which makes the bar longer than the time."""
    if not savings(time):
        return units.format_as(time.unit, time.value)
    saved = units.format_seconds(-sum(part.value for part in savings(time)))
    return f"{units.format_as(time.unit, time.value)}, up to the line; the {saved} beyond it are hidden"


def savings(breakdown: Breakdown) -> tuple[Breakdown, ...]:
    """The negative parts, such as communication hidden behind compute; no bar can show them."""
    return tuple(part for part in breakdown.parts if part.value < 0)


def shown(breakdown: Breakdown) -> tuple[Breakdown, ...]:
    """The parts of a bar: those with a value, or the whole where there are no parts."""
    return tuple(part for part in breakdown.parts if part.value > 0) or (breakdown,)


def _heading(title: str, figures: str) -> Text:
    return Text(title, style="bold").append(f"  {figures}", style="not bold")


def headline(page: Page) -> RenderableType:
    """Title, subtitle and the figures of the headline."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for label, value in page.figures:
        table.add_row(Text(label, style="dim"), Text(value, style="bold"))
    return Group(Text(page.title, style="bold"), Text(page.subtitle), Text(), table)
