"""Helps to draw the pictures of the site: one width, two colour schemes, boxes, arrows and grids of cells.

A picture is a small SVG on a card of its own, so that it is legible on light and on dark pages, and its letters keep
a readable size where a phone shrinks it to its width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autopar.views.markup import Markup, join, tag
from autopar.views.palette import PALETTE
from autopar.views.svg import line, rect, text

WIDTH = 420.0
SHOWN = 1.2  # width on a wide page over the width in the drawing's own units
MARGIN = 14.0
TITLE = 26.0  # height of a title line
LINE = 16.0  # height of a line of small text
COLOURS = PALETTE[:8]

_STYLE = Markup("""
svg { --card: #ffffff; --ink: #1b1e24; --quiet: #56606f; --line: #c3c9d2; --soft: #eef2fb; --empty: #e8ebf0;
  font: 13px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
@media (prefers-color-scheme: dark) {
  svg { --card: #181c23; --ink: #e7eaf0; --quiet: #a9b2c0; --line: #454d5a; --soft: #222b3b; --empty: #2b313b; }
}
.card { fill: var(--card); stroke: var(--line); }
.box { fill: var(--soft); stroke: var(--line); }
.plain { fill: var(--card); stroke: var(--line); }
.cell { stroke: var(--card); stroke-width: 1; }
.empty { fill: var(--empty); stroke: var(--card); stroke-width: 1; }
.strong { font-weight: 600; }
.small { font-size: 12px; fill: var(--quiet); }
.edge { stroke: var(--quiet); stroke-width: 1.4; fill: none; }
.pale { stroke: var(--line); stroke-width: 1; fill: none; stroke-dasharray: 3 3; }
.bold { stroke: var(--ink); stroke-width: 2.6; fill: none; }
.head { fill: var(--quiet); }
""")


def picture(label: str, height: float, *children: object) -> str:
    """An SVG file.

    Args:
        label: what the picture shows, for people who cannot see it.
        height: height in the drawing's own units.
        children: elements on the card.
    """
    card = rect(0.5, 0.5, WIDTH - 1, height - 1, rx=8, class_="card")
    return (
        tag(
            "svg",
            tag("title", label),
            tag("style", _STYLE),
            card,
            *children,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
            width=f"{WIDTH * SHOWN:.0f}",
            height=f"{height * SHOWN:.0f}",
            role="img",
        )
        + "\n"
    )


def centred(x: float, y: float, words: str, class_: str = "small", **more: object) -> Markup:
    """A line of text around a point."""
    return text(x, y, words, class_=class_, text_anchor="middle", **more)


def arrow(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A straight arrow, along the page or down it."""
    along = abs(x2 - x1) > abs(y2 - y1)
    size = 5 if (x2 - x1) + (y2 - y1) > 0 else -5
    points = (
        f"{x2},{y2} {x2 - size},{y2 - 4} {x2 - size},{y2 + 4}"
        if along
        else f"{x2},{y2} {x2 - 4},{y2 - size} {x2 + 4},{y2 - size}"
    )
    return join((line(x1, y1, x2, y2, class_="edge"), tag("polygon", points=points, class_="head")))


def grid(x: float, y: float, shape: tuple[int, int], size: float, colour: Callable[[int], str | None]) -> Markup:
    """Cells of a matrix, row by row.

    Args:
        x: left edge.
        y: upper edge.
        shape: number of rows and of columns.
        size: edge of a cell.
        colour: fill of a cell by its number; None leaves it empty.
    """
    rows, columns = shape
    return join(_cell(x + n % columns * size, y + n // columns * size, size, colour(n)) for n in range(rows * columns))


def _cell(x: float, y: float, size: float, fill: str | None) -> Markup:
    if fill is None:
        return rect(x, y, size, size, class_="empty")
    return rect(x, y, size, size, class_="cell", fill=fill)


class Box(NamedTuple):
    """A box of a flow.

    Attributes:
        title: what stands in its first line.
        lines: the lines below, in small letters.
        way: words beside the arrow that leads to it.
    """

    title: str
    lines: tuple[str, ...] = ()
    way: str = ""

    @property
    def height(self) -> float:
        return TITLE + LINE * len(self.lines) + (4 if self.lines else 2)


_GAP = 26.0  # between two boxes of a flow


def flow(label: str, boxes: Sequence[Box]) -> str:
    """A picture of boxes one below the other, with arrows between them."""
    parts, y = [], MARGIN
    for box in boxes:
        if y > MARGIN:
            parts += [arrow(WIDTH / 2, y - _GAP + 2, WIDTH / 2, y - 2)]
            parts += [text(WIDTH / 2 + 12, y - _GAP / 2 + 4, box.way, class_="small")]
        parts += _drawn(box, MARGIN, y, WIDTH - 2 * MARGIN)
        y += box.height + _GAP
    return picture(label, y - _GAP + MARGIN, *parts)


def _drawn(box: Box, x: float, y: float, width: float) -> Iterator[Markup]:
    yield rect(x, y, width, box.height, rx=6, class_="box")
    yield centred(x + width / 2, y + 18, box.title, "strong")
    for number, words in enumerate(box.lines):
        yield centred(x + width / 2, y + TITLE + 10 + number * LINE, words)


def columns(boxes: Sequence[Box], y: float) -> tuple[Markup, float]:
    """Boxes side by side, and the y below them."""
    gap = 10.0
    width = (WIDTH - 2 * MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    drawn = [
        part for number, box in enumerate(boxes) for part in _drawn(box, MARGIN + number * (width + gap), y, width)
    ]
    return join(drawn), y + max(box.height for box in boxes)
