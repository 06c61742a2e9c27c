"""Candidates as a picture of time against memory and as a table; sensitivities as bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar import units
from autopar.cost_model.breakdown import Candidate, pareto
from autopar.views import tables
from autopar.views.markup import Markup, join, tag
from autopar.views.page import BatchRow
from autopar.views.palette import PALETTE
from autopar.views.svg import Labels, Linear, at_two_widths, bounds, drawing, fitted, line, rect, text

LEFT, MARGIN, TOP, BOTTOM = 92.0, 24.0, 30.0, 360.0
TICK_WIDTH = 130.0  # between two values of the scale of memory
FAR_BYTES, FAR_SECONDS = 1.25, 4.0  # beyond this many bounds and best times, at the edge
CHOSEN = PALETTE[0]
SLOWER, FASTER = PALETTE[3], PALETTE[2]


def picture(candidates: Sequence[Candidate], bound_bytes: float) -> Markup:
    """A picture of time against memory; numbers refer to rows of the table, and a line joins the Pareto front."""
    ranked = tables.ranked(tuple(candidates))
    shown = [
        (number, each)
        for number, each in enumerate(ranked, 1)
        if math.isfinite(each.step_seconds) and math.isfinite(each.memory_bytes)
    ]
    return at_two_widths(lambda width: _picture(shown, bound_bytes, width)) if shown else Markup("")


def _picture(shown: Sequence[tuple[int, Candidate]], bound_bytes: float, width: float) -> Markup:
    fastest = min(c.step_seconds for _, c in shown)
    most = FAR_BYTES * max([bound_bytes, *(c.memory_bytes for _, c in shown if c.fits)])
    memory = (min(c.memory_bytes, most) for _, c in shown)
    across = _scale([bound_bytes, *memory], LEFT, width - MARGIN)
    up = _scale([min(c.step_seconds, FAR_SECONDS * fastest) for _, c in shown], BOTTOM, TOP)
    corners = _front([c for _, c in shown if c.fits], across, up)
    children = (
        *_axes(across, up),
        *_bound(across(bound_bytes), f"bound {units.format_bytes(bound_bytes)}"),
        _front_line(corners),
        *_points(shown, corners, across, up),
    )
    return drawing("Step time against memory of every candidate", BOTTOM + 46, *children, width=width)


def _scale(values: Sequence[float], start: float, stop: float) -> Linear:
    low, high = bounds(values)
    margin = 0.08 * (high - low) or 0.1 * high or 1.0
    return Linear(max(0.0, low - margin), high + margin, start, stop)


def _axes(across: Linear, up: Linear) -> Iterator[Markup]:
    for value in across.ticks(round(across.stop / TICK_WIDTH)):
        x = across(value)
        yield line(x, TOP, x, BOTTOM, class_="grid")
        words = units.format_bytes(value)
        yield text(x, BOTTOM + 18, words, class_="small", text_anchor="middle")
    for value in up.ticks(6):
        y = up(value)
        yield line(LEFT, y, across.stop, y, class_="grid")
        words = units.format_seconds(value)
        yield text(LEFT - 8, y + 4, words, class_="small", text_anchor="end")
    middle = (LEFT + across.stop) / 2
    yield text(middle, BOTTOM + 38, "memory of a rank", class_="small", text_anchor="middle")
    yield text(8, TOP - 14, "time of a step", class_="small")


def _bound(x: float, words: str) -> Iterator[Markup]:
    yield line(x, TOP - 4, x, BOTTOM, class_="bound")
    yield text(x, TOP - 10, words, class_="small strong", text_anchor="middle")


Point = tuple[float, float]


def _front(candidates: Sequence[Candidate], across: Linear, up: Linear) -> tuple[Point, ...]:
    """Corners of the staircase through the Pareto front; no candidate lies below and left of it."""
    corners: list[Point] = []
    for each in sorted(pareto(tuple(candidates)), key=lambda c: c.memory_bytes):
        x, y = across(each.memory_bytes), max(TOP, up(each.step_seconds))
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return tuple(corners)


def _front_line(corners: Sequence[Point]) -> Markup:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return tag("polyline", points=points, class_="front")


def _points(
    shown: Sequence[tuple[int, Candidate]], corners: Sequence[Point], across: Linear, up: Linear
) -> Iterator[Markup]:
    right = across.stop
    labels = Labels((LEFT, TOP - 8, right, BOTTOM))
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):  # a level or an upright line
        labels.taken.append((min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)))
    places = [(n, c, min(right, across(c.memory_bytes)), max(TOP, up(c.step_seconds))) for n, c in shown]
    for _, each, x, y in places:
        labels.block(x, y, 8)
        yield _point(each, x, y)
    for number, each, x, y in sorted(places, key=lambda place: not place[1].chosen):
        words = f"{number} {each.name}" if each.chosen else str(number)
        if across(each.memory_bytes) > right:
            words += f", at {units.format_bytes(each.memory_bytes)}"
        if up(each.step_seconds) < TOP:
            words += f", at {units.format_seconds(each.step_seconds)}"
        yield labels.place(x, y, 7, words) or labels.place(x, y, 7, str(number)) or Markup("")


def _point(each: Candidate, x: float, y: float) -> Markup:
    """The mark of a candidate: a ring for the chosen one, a cross if it does not fit, else a dot."""
    seconds, memory = units.format_seconds(each.step_seconds), units.format_bytes(each.memory_bytes)
    title = tag("title", f"{each.name}: {seconds}, {memory}\n{tables.verdict(each)}")
    if not each.fits:
        d = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return tag("path", title, d=d, class_="cross")
    dot = tag("circle", title, cx=x, cy=y, r=5.0, fill=CHOSEN.fill, class_="dot")
    ring = tag("circle", cx=x, cy=y, r=9.0, class_="ring") if each.chosen else None
    return tag("g", dot, ring)


def table(candidates: Sequence[Candidate]) -> Markup:
    """All candidates, those that fit first, numbered as in the picture."""
    front = pareto(tuple(c for c in candidates if c.fits))
    head = ("", "plan", "time", "memory", "traffic", "bound by", "why not")
    rows = (_table_row(number, each, each in front) for number, each in enumerate(tables.ranked(tuple(candidates)), 1))
    header = tag("tr", *(tag("th", words, scope="col") for words in head))
    return tag("div", tag("table", tag("thead", header), tag("tbody", join(rows))), class_="scroll")


def _table_row(number: int, each: Candidate, on_front: bool) -> Markup:
    badges = [("chosen", each.chosen), ("fastest for its memory", on_front), ("does not fit", not each.fits)]
    shown = (tag("span", words, class_="badge") for words, holds in badges if holds)
    figures = (
        units.format_seconds(each.step_seconds),
        units.format_bytes(each.memory_bytes),
        units.format_bytes(each.traffic_bytes),
    )
    return tag(
        "tr",
        tag("td", number, class_="number quiet"),
        tag("td", each.name, " ", *shown),
        *(tag("td", words, class_="number") for words in figures),
        tag("td", each.binds),
        tag("td", "" if each.chosen and not each.why_not else tables.verdict(each), class_="quiet"),
        class_="chosen" if each.chosen else None,
    )


def batch_table(batches: Sequence[BatchRow]) -> Markup:
    """The batches that were tried, smallest first."""
    word, _ = tables.throughput_of(batches[0])
    head = ("batch", "step", f"{word} per second", "memory", "plan")
    header = tag("tr", *(tag("th", words, scope="col") for words in head))
    rows = join(map(_batch_row, batches))
    return tag("div", tag("table", tag("thead", header), tag("tbody", rows)), class_="scroll")


def _batch_row(each: BatchRow) -> Markup:
    badges = [
        ("of this report", each.is_chosen),
        ("fastest per sample", each.is_fastest),
        ("largest in fewest micro-batches", each.is_largest),
        ("estimate", not each.is_searched),
    ]
    shown = (tag("span", words, class_="badge") for words, holds in badges if holds)
    _, *figures, plan = tables.batch_cells(each)
    return tag(
        "tr",
        *(tag("td", words, class_="number") for words in figures),
        tag("td", plan, " ", *shown),
        class_="chosen" if each.is_chosen else None,
    )


def sensitivity_bars(sensitivity: Mapping[str, float], smallest: float = 1e-5) -> Markup:
    """A bar for every symbol: to the right if a larger value makes the step slower, to the left if faster."""
    found = tables.strongest(sensitivity, smallest)
    if not found:
        return Markup("")
    return at_two_widths(lambda width: _bars(found, width))


def _bars(found: Sequence[tuple[str, float]], width: float) -> Markup:
    longest = abs(found[0][1])
    scale = Linear(-longest, longest, 100 + 0.216 * width, width - 90)
    zero, row = scale(0.0), 26.0
    children = [line(zero, 18, zero, 26 + row * len(found), class_="axis")]
    children.append(text(zero - 8, 14, "faster", class_="small", text_anchor="end"))
    children.append(text(zero + 8, 14, "slower", class_="small"))
    for index, (name, value) in enumerate(found):
        children.append(_sensitivity(name, value, scale, 26 + index * row))
    return drawing("Change of the step time when a number grows by 1 %", 30 + row * len(found), *children, width=width)


def _sensitivity(name: str, value: float, scale: Linear, y: float) -> Markup:
    x, zero = scale(value), scale(0.0)
    colour = SLOWER if value > 0 else FASTER
    words = units.format_change(value)
    side = ("start", 6.0) if value > 0 else ("end", -6.0)
    return tag(
        "g",
        text(8, y + 14, fitted(name, scale.start - 75)),
        rect(min(x, zero), y + 2, abs(x - zero), 17, fill=colour.fill, title=f"{name}: {words}"),
        text(x + side[1], y + 15, words, class_="small", text_anchor=side[0]),
    )
