"""A stacked bar with its scale, bound and legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar import units
from autopar.cost_model.breakdown import Breakdown
from autopar.views.markup import Markup, join, tag
from autopar.views.palette import Colour
from autopar.views.svg import TEXT_SIZE, Linear, at_two_widths, drawing, fitted, line, rect, text

MARGIN = 10.0
TICK_WIDTH = 130.0  # between two values of the scale
TOP, HEIGHT = 26.0, 46.0


def stacked_bar(
    label: str, parts: Sequence[Breakdown], colours: Mapping[str, Colour], bound: tuple[float, str] | None = None
) -> Markup:
    """The parts laid end to end, numbered as in the legend, and a line at a value with a name."""
    return at_two_widths(lambda width: _bar(label, parts, colours, bound, width))


def _bar(
    label: str, parts: Sequence[Breakdown], colours: Mapping[str, Colour], bound: tuple[float, str] | None, width: float
) -> Markup:
    unit = parts[0].unit
    whole = sum(part.value for part in parts)
    scale = Linear(0.0, (max(whole, bound[0] if bound else 0.0) or 1.0) * 1.02, MARGIN, width - MARGIN)
    children = [*_ticks(scale, unit), *_segments(parts, colours, scale)]
    if bound is not None:
        value, words = bound
        anchor = "end" if scale(value) > width / 2 else "start"
        children.append(_bound(scale(value), f"{words} {units.format_as(unit, value)}", anchor))
    return drawing(label, TOP + HEIGHT + 26, *children, width=width)


def _segments(parts: Sequence[Breakdown], colours: Mapping[str, Colour], scale: Linear) -> Iterator[Markup]:
    reached = 0.0
    for number, part in enumerate(parts, 1):
        x, reached = scale(reached), reached + part.value
        wide = scale(reached) - x
        colour = colours[part.name]
        title = f"{part.name}: {units.format_as(part.unit, part.value)}"
        bar = rect(x, TOP, wide, HEIGHT, fill=colour.fill, class_="segment", title=title)
        yield tag("g", bar, *_inscription(number, part, x, wide, colour))


def _inscription(number: int, part: Breakdown, x: float, wide: float, colour: Colour) -> Iterator[Markup]:
    """The number of the part, and below it name or value where they fit."""
    inner = wide - 12
    if inner < 4 + TEXT_SIZE * 0.6 * (number > 9):
        return
    name = fitted(f"{number}  {part.name}", inner) or str(number)
    yield text(x + 6, TOP + 19, name, fill=colour.ink, class_="on")
    value = units.format_as(part.unit, part.value)
    if fitted(value, inner) == value:
        yield text(x + 6, TOP + 36, value, fill=colour.ink, class_="on strong")


def _ticks(scale: Linear, unit: str) -> Iterator[Markup]:
    base = TOP + HEIGHT
    for value in scale.ticks(round(scale.stop / TICK_WIDTH)):
        x = scale(value)
        words = units.format_as(unit, value) if value else "0"
        yield line(x, base, x, base + 5, class_="axis")
        anchor = "start" if x < scale.start + 20 else "end" if x > scale.stop - 25 else "middle"
        yield text(x, base + 19, words, class_="small", text_anchor=anchor)


def _bound(x: float, words: str, anchor: str) -> Markup:
    return tag(
        "g",
        line(x, TOP - 8, x, TOP + HEIGHT + 6, class_="halo"),
        line(x, TOP - 8, x, TOP + HEIGHT + 6, class_="bound"),
        text(x, TOP - 12, words, class_="small strong", text_anchor=anchor),
    )


def legend(parts: Sequence[Breakdown], colours: Mapping[str, Colour], whole: float) -> Markup:
    """A table of the parts in the order of the bar; those without a colour are not in it."""
    rows = (
        tag(
            "tr",
            tag("td", swatch(colours[part.name], str(number)) if part.name in colours else ""),
            tag("td", part.name),
            tag("td", units.format_as(part.unit, part.value), class_="number"),
            tag("td", units.format_share(part.value, whole), class_="number"),
            tag("td", part.note, class_="quiet"),
        )
        for number, part in enumerate(parts, 1)
    )
    return tag("table", tag("tbody", join(rows)), class_="legend")


def swatch(colour: Colour, words: str = "") -> Markup:
    """A small field of a colour with a number or name in it."""
    style = f"background:{colour.fill};color:{colour.ink}"
    return tag("span", words, class_="swatch", style=style)
