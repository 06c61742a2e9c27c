"""The results as a page of HTML with pictures, and as a summary of a screen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from autopar import units
from autopar.views import palette
from autopar.views.html import Section, html_of
from autopar.views.markup import Markup, escape, tag
from autopar.views.svg import Linear, Log, bounds, drawing, line, rect, text
from benchmarks.accelerator.figures import Figure, Picture, Result
from benchmarks.accelerator.parts import Part

STYLES = {"pass": "green", "FAIL": "bold red", "not measured": "dim", "not asked": "dim"}
_FOOTER = escape("Made by python -m benchmarks.accelerator.")
LABEL_WIDTH, ROW_HEIGHT, BAR_HEIGHT = 330.0, 20.0, 14.0
CURVES_HEIGHT, CURVES_LEFT, CURVES_RIGHT = 300.0, 90.0, 820.0


def shown(value: float | None, unit: str) -> str:
    """A value for people.

    >>> shown(0.0123, "seconds"), shown(1e9, "bytes/s"), shown(0.98765, "ratio"), shown(None, "ratio")
    ('12.3 ms', '1.00 GB/s', '0.988', '-')
    """
    if value is None:
        return "-"
    if unit in ("seconds", "bytes"):
        return units.format_as(unit, value)
    if unit == "FLOP/s":
        return units.format_flops(value)
    if unit == "bytes/s":
        return units.format_rate(value)
    if unit == "count":
        return f"{value:,.0f}"
    return f"{value:.1e}" if unit == "error" and value else f"{value:.3f}"


def summary(results: Sequence[Result]) -> Table:
    """A screen: a row per part, and below it each figure that has a limit."""
    table = Table(title="autopar on this device", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("verdict")
    for result in results:
        table.add_row(result.name, _state(result), "", "", "", style="bold")
        for figure in result.figures:
            if figure.limit is not None:
                verdict = Text(figure.verdict, style=STYLES[figure.verdict])
                table.add_row("", figure.name, *_numbers(figure), verdict)
    return table


def _numbers(figure: Figure) -> tuple[str, str]:
    limit = "" if figure.limit is None else shown(figure.limit, figure.unit)
    return shown(figure.value, figure.unit), limit


def _state(result: Result) -> str:
    counted = units.counted(len(result.figures), "figure")
    words = f"{result.state}, {counted}, {result.seconds:.0f} s"
    return f"{words}: {result.why.strip().splitlines()[-1]}" if result.why else words


def to_html(results: Sequence[Result], parts: Sequence[Part]) -> str:
    """The page of results."""
    questions = {part.name: part.question for part in parts}
    return html_of(
        "autopar on an accelerator",
        _header(results),
        [_section(result, questions.get(result.name, "")) for result in results],
        {"results": [_finite(result.to_json()) for result in results]},
        _FOOTER,
    )


def _finite(value: Any) -> Any:
    """The value with numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _header(results: Sequence[Result]) -> Markup:
    counts = {word: 0 for word in STYLES}
    for result in results:
        for figure in result.figures:
            if figure.verdict:
                counts[figure.verdict] += 1
    done = sum(result.state == "done" for result in results)
    figures = {"parts done": f"{done} of {len(results)}", **counts}
    tiles = (tag("div", tag("dt", name), tag("dd", value), class_="tile") for name, value in figures.items())
    run = results[0].run if results else {}
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in run.items())
    return tag(
        "header",
        tag("h1", "autopar on an accelerator"),
        tag("dl", *tiles, class_="tiles"),
        tag("dl", *pairs, class_="asked"),
    )


def _section(result: Result, question: str) -> Section:
    sentences = tag("ul", *(tag("li", each) for each in result.sentences))
    why = tag("pre", tag("code", result.why)) if result.why else None
    pictures = (_picture(each) for each in result.pictures)
    body = (tag("p", _state(result)), why, _table(result.figures), *pictures, sentences)
    return Section(result.name, result.name, question, *body)


def _table(figures: Sequence[Figure]) -> Markup:
    heads = tag("tr", *(tag("th", head) for head in ("figure", "value", "limit", "", "note")))
    rows = (
        tag(
            "tr",
            tag("td", figure.name),
            *(tag("td", words, class_="number") for words in _numbers(figure)),
            tag("td", figure.verdict),
            tag("td", figure.note, class_="quiet"),
        )
        for figure in figures
    )
    return tag("div", tag("table", tag("thead", heads), tag("tbody", *rows)), class_="scroll")


def _picture(picture: Picture) -> Markup:
    svg = _bars(picture) if picture.kind == "bars" else _curves(picture)
    return tag("figure", tag("figcaption", picture.title), svg)


def _legend(picture: Picture, colours: Mapping[str, palette.Colour], y: float) -> Iterator[Markup]:
    x = 10.0
    for name, colour in colours.items():
        yield rect(x, y - 10, 12, 12, fill=colour.fill)
        yield text(x + 18, y, name, class_="small")
        x += 40 + 7.0 * len(name)


def _bars(picture: Picture) -> Markup:
    """One bar for each value, the series side by side."""
    rows = [(name, *pair) for name, values in picture.series.items() for pair in values]
    rows.sort(key=lambda row: [pair[0] for pair in picture.series[row[0]]].index(row[1]))
    largest = max((value for *_, value in rows), default=0.0) or 1.0
    scale = Linear(0.0, largest, LABEL_WIDTH, 950.0)
    colours = palette.in_order(picture.series)
    children: list[Markup] = []
    for number, (name, label, value) in enumerate(rows):
        y = number * ROW_HEIGHT + 6
        children += [
            text(LABEL_WIDTH - 8, y + 11, label, class_="small", text_anchor="end"),
            rect(LABEL_WIDTH, y, max(1.0, scale(value) - LABEL_WIDTH), BAR_HEIGHT, fill=colours[name].fill),
            text(scale(value) + 6, y + 11, shown(value, picture.unit), class_="small"),
        ]
    below = len(rows) * ROW_HEIGHT + 24
    return drawing(picture.title, below + 10, *children, *_legend(picture, colours, below))


def _curves(picture: Picture) -> Markup:
    """Values over sizes, both axes logarithmic."""
    points = [pair for values in picture.series.values() for pair in values]
    low, high = bounds(float(size) for size, _ in points)
    least, most = bounds(value for _, value in points)
    across = Log(low / 1.1, high * 1.1, CURVES_LEFT, CURVES_RIGHT)
    up = Log(least / 1.5, most * 1.5, CURVES_HEIGHT - 40, 10.0)
    colours = palette.in_order(picture.series)
    children = [*_grid(across, up, picture)]
    for name, values in picture.series.items():
        places = [(across(float(size)), up(value)) for size, value in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        children.append(tag("polyline", points=path, fill="none", stroke=colours[name].fill, stroke_width=2))
        children += [tag("circle", cx=x, cy=y, r=3, fill=colours[name].fill) for x, y in places]
    legend = _legend(picture, colours, CURVES_HEIGHT + 12)
    return drawing(picture.title, CURVES_HEIGHT + 24, *children, *legend)


def _grid(across: Log, up: Log, picture: Picture) -> Iterator[Markup]:
    base = CURVES_HEIGHT - 40
    for value in up.ticks():
        yield line(CURVES_LEFT, up(value), CURVES_RIGHT, up(value), class_="grid")
        words = shown(value, picture.unit)
        yield text(CURVES_LEFT - 8, up(value) + 4, words, class_="small", text_anchor="end")
    for size in across.ticks():
        yield line(across(size), base, across(size), base + 5, class_="axis")
        words = units.format_count(size)
        yield text(across(size), base + 18, words, class_="small", text_anchor="middle")
    yield text((CURVES_LEFT + CURVES_RIGHT) / 2, base + 34, picture.across, class_="small")
