"""A step as lanes of bars: compute, and the communication of every axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar import units
from autopar.cost_model.breakdown import Event
from autopar.views import lanes
from autopar.views.lanes import COMPUTE, LaneRow, Span
from autopar.views.markup import Markup, join, tag
from autopar.views.palette import REST, Colour
from autopar.views.stack import swatch
from autopar.views.svg import WIDTH, Linear, drawing, fitted, line, rect, text, text_width

ROW, GAP = 26.0, 8.0
TOP = 24.0
RIGHT = WIDTH - 10.0
NARROW = 1.2  # bars narrower than this are drawn together with neighbours as narrow
CLOSE_UP = 45  # events in the closer look
FEWEST_LETTERS = 4  # a name cut to so few says nothing


def timeline(events: Sequence[Event], colours: Mapping[str, Colour]) -> Markup:
    """The whole step and, where its bars are too many to tell apart, a closer look at a part of it."""
    found = lanes.rows(events)
    compute = lanes.busy(event for event in events if event.lane == COMPUTE)
    whole = (0.0, max(lanes.end(event) for event in events))
    parts = [_figure("The whole step", found, compute, whole, colours)]
    window = _window(events)
    if window is not None:
        start, stop = map(units.format_seconds, window)
        label = f"A closer look: {start} to {stop}"
        parts.append(_figure(label, found, compute, window, colours))
    return join((_key(found, colours), *parts))


def _window(events: Sequence[Event]) -> Span | None:
    """A stretch of about `CLOSE_UP` events, a third of the way into the step."""
    ordered = sorted(events, key=lambda e: e.start_seconds)
    if len(ordered) < 2 * CLOSE_UP:
        return None
    first = len(ordered) // 3
    window = (ordered[first].start_seconds, ordered[first + CLOSE_UP].start_seconds)
    return window if window[1] > window[0] else None


def _figure(
    label: str, found: Sequence[LaneRow], compute: Sequence[Span], window: Span, colours: Mapping[str, Colour]
) -> Markup:
    left = 22 + max(text_width(row.name) for row in found)
    scale = Linear(*window, left, RIGHT)
    bottom = TOP + len(found) * (ROW + GAP)
    children: list[Markup] = [*_grid(scale, bottom)]
    for index, row in enumerate(found):
        y = TOP + index * (ROW + GAP)
        children.append(text(6, y + ROW * 0.66, row.name, class_="strong"))
        children.append(line(left, y + ROW, RIGHT, y + ROW, class_="grid"))
        colour = colours.get(row.lane, REST)
        children.append(tag("g", *(_bar(bar, row, compute, scale, y, colour) for bar in bars(row, scale))))
    caption = tag("figcaption", label)
    return tag("figure", caption, drawing(f"{label} as lanes", bottom + 24, *children))


def _grid(scale: Linear, bottom: float) -> Iterator[Markup]:
    for value in scale.ticks(8):
        x = scale(value)
        words = units.format_seconds(value) if value else "0"
        yield line(x, TOP - 6, x, bottom, class_="grid")
        anchor = "end" if x > RIGHT - 30 else "middle"
        yield text(x, bottom + 16, words, class_="small", text_anchor=anchor)


@dataclass(frozen=True)
class Bar:
    """One bar of the drawing: an event, or several events too narrow to be seen alone."""

    start: float
    stop: float
    events: tuple[Event, ...]


def bars(row: LaneRow, scale: Linear) -> tuple[Bar, ...]:
    """The bars of a row inside the scale; together they cover every event in it."""
    found: list[Bar] = []
    for event in row.events:
        if lanes.end(event) <= scale.low or event.start_seconds >= scale.high:
            continue
        bar = Bar(scale(max(event.start_seconds, scale.low)), scale(min(lanes.end(event), scale.high)), (event,))
        if found and _narrow(found[-1]) and _narrow(bar) and bar.start - found[-1].stop < NARROW:
            bar = Bar(found[-1].start, bar.stop, (*found.pop().events, event))
        found.append(bar)
    return tuple(found)


def _narrow(bar: Bar) -> bool:
    """Whether every event in it is narrow on average."""
    return (bar.stop - bar.start) / len(bar.events) < NARROW


def _bar(bar: Bar, row: LaneRow, compute: Sequence[Span], scale: Linear, y: float, colour: Colour) -> Markup:
    wide = bar.stop - bar.start
    shade = "hidden" if row.lane != COMPUTE else "busy"
    parts = [rect(bar.start, y, wide, ROW, fill=colour.fill, class_=f"event {shade}", title=_title(bar))]
    if row.lane != COMPUTE:
        parts.extend(_exposed(bar, compute, scale, y, colour))
    words = fitted(bar.events[0].name, wide - 6, 11) if len(bar.events) == 1 else ""
    if len(words) > FEWEST_LETTERS:
        ink = colour.ink if row.lane == COMPUTE else None
        parts.append(text(bar.start + 3, y + ROW * 0.65, words, fill=ink, class_="event-name"))
    return tag("g", *parts)


def _exposed(bar: Bar, compute: Sequence[Span], scale: Linear, y: float, colour: Colour) -> Iterator[Markup]:
    """A strong foot where compute is idle meanwhile."""
    spans = lanes.busy(bar.events)
    for start, stop in (gap for span in spans for gap in lanes.exposed(span, compute)):
        low, high = max(scale(start), bar.start), min(scale(stop), bar.stop)
        if high - low > 0.05:
            yield rect(low, y + ROW - 7, high - low, 7, fill=colour.fill, class_="exposed")


def _title(bar: Bar) -> str:
    first = bar.events[0]
    if len(bar.events) == 1:
        words = [f"{first.name}: {units.format_seconds(first.duration_seconds)}"]
        words.append(f"from {units.format_seconds(first.start_seconds)}")
        words.extend(f"{key}: {value}" for key, value in first.detail.items())
        return "\n".join(words)
    counts = Counter(event.name for event in bar.events).most_common(6)
    total = sum(event.duration_seconds for event in bar.events)
    names = "\n".join(f"{count} x {name}" for name, count in counts)
    return f"{len(bar.events)} events, {units.format_seconds(total)}\n{names}"


def _key(found: Sequence[LaneRow], colours: Mapping[str, Colour]) -> Markup:
    names = dict.fromkeys(row.lane for row in found)
    swatches = [tag("span", swatch(colours.get(name, REST)), f" {name}", class_="key") for name in names]
    words = (
        "Communication is pale where it overlaps with compute; the strong line at its foot marks where compute is idle."
    )
    return tag("p", *swatches, tag("span", words, class_="quiet"), class_="keys")
