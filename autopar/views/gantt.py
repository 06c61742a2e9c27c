"""A simulated pipeline step as a picture: a row for every rank, a bar for every action, blank where it idles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from autopar import units
from autopar.cost_model.breakdown import Event
from autopar.pipeline.simulation import Simulation, Span
from autopar.views.markup import Markup, join, tag
from autopar.views.palette import PALETTE, REST, Colour
from autopar.views.stack import swatch
from autopar.views.svg import WIDTH, Linear, drawing, line, rect, text, text_width

KINDS: Mapping[str, tuple[str, Colour]] = {
    "F": ("forward", PALETTE[0]),
    "B": ("backward", PALETTE[2]),
    "I": ("backward, of inputs", PALETTE[1]),
    "W": ("backward, of weights", PALETTE[4]),
    "U": ("update", PALETTE[3]),
}

ROW, GAP, TOP = 22.0, 6.0, 8.0
LETTERS, MARGIN = 11.0, 3.0  # size of the numbers, and the room that they leave
PALE = 0.4
NARROW = 4.0  # bars narrower than this are drawn together with neighbours at most TOUCHING away
TOUCHING = 1.0
CELLS = 1.5  # of a terminal for an action, on average, so that it is seen
CLEAR, CLOSE_UP = 120, 60  # bars of a row that can be told apart, and that a closer look shows


Window = tuple[float, float]  # seconds of the step


def caption(simulation: Simulation) -> str:
    """The step, its bubble and its largest memory in words."""
    words = [
        f"step {units.format_seconds(simulation.step_seconds)}",
        f"bubble {units.format_share(simulation.bubble_fraction, 1.0)}",
    ]
    peak = max(simulation.peak_bytes)
    if peak:
        rank = simulation.peak_bytes.index(peak)
        at = units.format_seconds(simulation.peak_seconds[rank])
        words.append(f"peak {units.format_bytes(peak)} on rank {rank} at {at}")
    return ", ".join(words)


def events(simulation: Simulation) -> tuple[Event, ...]:
    """The spans for a trace: for each rank a lane of compute and a lane of sends."""
    return tuple(
        Event(
            f"rank {s.rank}" if s.kind in KINDS else f"rank {s.rank} sends",
            f"{s.stage}{s.kind}{s.micro_batch}",
            s.begin_seconds,
            s.end_seconds - s.begin_seconds,
            {"stage": s.stage, "micro_batch": s.micro_batch},
        )
        for s in simulation.spans
    )


@dataclass(frozen=True)
class _Rows:
    """The computations of every rank, and the stages drawn pale: every second one of a rank."""

    spans: tuple[tuple[Span, ...], ...]
    pale: frozenset[int]

    @classmethod
    def of(cls, simulation: Simulation) -> _Rows:
        rows: list[list[Span]] = [[] for _ in range(simulation.ranks)]
        for span in simulation.spans:
            if span.kind in KINDS:
                rows[span.rank].append(span)
        stages = (sorted({span.stage for span in row}) for row in rows)
        pale = frozenset(stage for found in stages for stage in found[1::2])
        return cls(tuple(map(tuple, rows)), pale)

    @property
    def kinds(self) -> tuple[str, ...]:
        found = {span.kind for row in self.spans for span in row}
        return tuple(kind for kind in KINDS if kind in found)

    @property
    def longest(self) -> int:
        return max(map(len, self.spans))


# --- as SVG


def gantt(simulation: Simulation) -> Markup:
    """The whole step and, where its bars are too many to tell apart, closer looks at both its ends."""
    rows, stop = _Rows.of(simulation), simulation.step_seconds
    parts = [_figure(f"The whole step: {caption(simulation)}", rows, simulation, (0.0, stop))]
    if rows.longest > CLEAR:
        near = stop * CLOSE_UP / rows.longest
        parts.append(_figure("A closer look at the start", rows, simulation, (0.0, near)))
        words = f"A closer look at the end, from {units.format_seconds(stop - near)} on"
        parts.append(_figure(words, rows, simulation, (stop - near, stop)))
    return join((_key(rows), *parts))


def _figure(label: str, rows: _Rows, simulation: Simulation, window: Window) -> Markup:
    names = [f"rank {rank}" for rank in range(simulation.ranks)]
    peaks = [units.format_bytes(size) if size else "" for size in simulation.peak_bytes]
    left, right = 16 + _widest(names), WIDTH - 16 - _widest(peaks)
    scale = Linear(*window, left, right)
    bottom = TOP + simulation.ranks * (ROW + GAP)
    children = [*_grid(scale, bottom)]
    for rank, row in enumerate(rows.spans):
        y = TOP + rank * (ROW + GAP)
        children.append(text(6, y + ROW * 0.68, names[rank], class_="strong"))
        children.append(text(right + 10, y + ROW * 0.68, peaks[rank], class_="small"))
        children.append(tag("g", *_bars(row, rows.pale, scale, y)))
    figcaption = tag("figcaption", label)
    return tag("figure", figcaption, drawing(f"{label}, a row a rank", bottom + 24, *children))


def _widest(words: Sequence[str]) -> float:
    return max(map(text_width, words))


def _grid(scale: Linear, bottom: float) -> Iterator[Markup]:
    """Round times from the window's start on, because those from the step's may not tell apart."""
    sign = "+" if scale.low else ""
    scale = Linear(0.0, scale.high - scale.low, scale.start, scale.stop)
    for value in scale.ticks(8):
        x = scale(value)
        yield line(x, TOP - 4, x, bottom, class_="grid")
        words = f"{sign}{units.format_seconds(value) if value else 0}"
        yield text(x, bottom + 16, words, class_="small", text_anchor="middle")


def _bars(row: Sequence[Span], pale: frozenset[int], scale: Linear, y: float) -> Iterator[Markup]:
    for spans in _together(row, scale):
        start = scale(max(spans[0].begin_seconds, scale.low))
        wide = scale(min(spans[-1].end_seconds, scale.high)) - start
        if len(spans) == 1:
            yield from _bar(spans[0], spans[0].stage in pale, start, y, wide)
        else:
            words = f"{_name(spans[0])} to {_name(spans[-1])}: {len(spans)} actions"
            yield rect(start, y, wide, ROW, fill=REST.fill, title=words)


def _together(row: Sequence[Span], scale: Linear) -> Iterator[list[Span]]:
    """The spans inside the scale; neighbours that touch and are narrow go together."""
    group: list[Span] = []
    for span in row:
        if span.end_seconds <= scale.low or span.begin_seconds >= scale.high:
            continue
        if group and not (_narrow(group[-1], scale) and _narrow(span, scale) and _touch(group[-1], span, scale)):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _narrow(span: Span, scale: Linear) -> bool:
    return scale(span.end_seconds) - scale(span.begin_seconds) < NARROW


def _touch(before: Span, after: Span, scale: Linear) -> bool:
    return scale(after.begin_seconds) - scale(before.end_seconds) < TOUCHING


def _bar(span: Span, pale: bool, x: float, y: float, wide: float) -> Iterator[Markup]:
    colour = KINDS[span.kind][1]
    seconds = units.format_seconds(span.end_seconds - span.begin_seconds)
    title = f"{_name(span)}: {seconds}\nfrom {units.format_seconds(span.begin_seconds)}"
    opacity = PALE if pale else None
    yield rect(x, y, wide, ROW, fill=colour.fill, fill_opacity=opacity, class_="event busy", title=title)
    number = str(span.micro_batch)
    if text_width(number, LETTERS) + MARGIN <= wide:
        yield text(
            x + wide / 2,
            y + ROW * 0.68,
            number,
            fill=None if pale else colour.ink,
            class_="event-name",
            text_anchor="middle",
        )


def _name(span: Span) -> str:
    return f"{KINDS[span.kind][0]} of micro-batch {span.micro_batch} on stage {span.stage}"


def _key(rows: _Rows) -> Markup:
    swatches = [tag("span", swatch(KINDS[kind][1]), f" {KINDS[kind][0]}", class_="key") for kind in rows.kinds]
    words = "Numbers on bars are micro-batches; blank is idle."
    if rows.pale:
        words += " Every second stage of a rank is pale."
    if rows.longest > CLEAR:
        words += " Bars too narrow to be told apart are one grey bar."
    return tag("p", *swatches, tag("span", words, class_="quiet"), class_="keys")


# --- in a terminal


@dataclass(frozen=True)
class Gantt:
    """The step in a terminal, as wide as that is."""

    simulation: Simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        simulation, rows = self.simulation, _Rows.of(self.simulation)
        names = [f"rank {rank}" for rank in range(simulation.ranks)]
        peaks = [units.format_bytes(size) if size else "" for size in simulation.peak_bytes]
        left, right = max(map(len, names)) + 1, max(map(len, peaks)) + 1
        width = max(1, options.max_width - left - right)
        yield Text(caption(simulation))
        for words, window in self._windows(rows, width):
            if words:
                yield Text(words, Style(dim=True))
            for name, peak, row in zip(names, peaks, rows.spans, strict=True):
                yield Segment(name.ljust(left))
                for glyph, style in _cells(row, rows.pale, window, width, options.ascii_only):
                    yield Segment(glyph, style)
                yield Segment(peak.rjust(right), Style(dim=True))
                yield Segment.line()
        yield _legend(rows, options.ascii_only)

    def _windows(self, rows: _Rows, width: int) -> Iterator[tuple[str, Window]]:
        """The whole step, or its two ends where an action would be less than a cell."""
        stop = self.simulation.step_seconds
        if width >= CELLS * rows.longest:
            yield "", (0.0, stop)
        else:
            near = stop * width / (CELLS * rows.longest)
            yield f"the first {units.format_seconds(near)}", (0.0, near)
            yield f"the last {units.format_seconds(near)}", (stop - near, stop)


def _cells(
    row: Sequence[Span], pale: frozenset[int], window: Window, width: int, ascii_only: bool
) -> list[tuple[str, Style | None]]:
    cells: list[tuple[str, Style | None]] = [(" ", None)] * width
    scale = Linear(*window, 0, width)
    for span in row:
        start, stop = (min(max(round(scale(at)), 0), width) for at in (span.begin_seconds, span.end_seconds))
        colour, dim = KINDS[span.kind][1], span.stage in pale
        glyph = colour.ascii_glyph if ascii_only else colour.glyph
        cells[start:stop] = [(glyph, Style(color=colour.terminal, dim=dim))] * (stop - start)
        number = str(span.micro_batch)
        if len(number) < stop - start:  # so that a glyph is left to tell the kind
            style = Style(color=colour.terminal, reverse=True, dim=dim)
            cells[start : start + len(number)] = [(digit, style) for digit in number]
    return cells


def _legend(rows: _Rows, ascii_only: bool) -> Text:
    parts = []
    for kind in rows.kinds:
        name, colour = KINDS[kind]
        glyph = colour.ascii_glyph if ascii_only else colour.glyph
        parts.append(Text.assemble((glyph, Style(color=colour.terminal)), f" {name}"))
    if rows.pale:
        parts.append(Text("dim: every second stage of a rank"))
    return Text("   ").join(parts)
