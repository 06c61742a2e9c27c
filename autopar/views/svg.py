"""Helps to draw: scales with round ticks, text that fits, labels that do not lie on each other.

Drawings have a fixed width in their own units and shrink with the page; what is text in them is text. Pictures that
are read as a whole are drawn for two widths, of which the style sheet shows one (`at_two_widths`); others scroll.
Lines and letters take their colours from the page's style sheet, so that they follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autopar.views.markup import Markup, join, tag

WIDTH, NARROW = 1068.0, 440.0  # of a drawing on a wide page, and on that of a phone
LETTER = 0.58  # mean width of a letter over its size, in common sans-serif fonts, on the safe side
TEXT_SIZE = 12.0


def drawing(label: str, height: float, *children: object, width: float = WIDTH) -> Markup:
    """An SVG with a name for screen readers, in a frame that scrolls where the page is narrow."""
    svg = tag(
        "svg",
        tag("title", label),
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        aria_label=label,
    )
    # A frame that scrolls must be reachable by keyboard.
    return tag("div", svg, class_="drawing", tabindex=0, role="group", aria_label=label)


def at_two_widths(draw: Callable[[float], Markup]) -> Markup:
    """The drawings of a function for a wide page and for a narrow one."""
    return join((tag("div", draw(WIDTH), class_="wide"), tag("div", draw(NARROW), class_="narrow")))


def rect(x: float, y: float, width: float, height: float, **attributes: object) -> Markup:
    """A rectangle; `title` is shown on hovering."""
    title = attributes.pop("title", None)
    inside = tag("title", title) if title is not None else None
    return tag("rect", inside, x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, words: object, **attributes: object) -> Markup:
    return tag("text", words, x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def text_width(words: str, size: float = TEXT_SIZE) -> float:
    """About how wide a text is."""
    return len(words) * size * LETTER


def fitted(words: str, width: float, size: float = TEXT_SIZE) -> str:
    """The part of a text that fits, with an ellipsis where it is cut; "" where nothing useful fits."""
    if text_width(words, size) <= width:
        return words
    room = int(width / (size * LETTER)) - 1
    return words[:room].rstrip() + "…" if room >= 3 else ""


@dataclass(frozen=True)
class Linear:
    """A scale from values to places: `low` is at `start`, `high` at `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)

    def ticks(self, count: int = 6) -> tuple[float, ...]:
        """Round values, about `count` of them."""
        span = self.high - self.low
        if span <= 0:
            return (self.low,)
        rough = span / count
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return tuple(n * step for n in range(first, last + 1))


@dataclass(frozen=True)
class Log:
    """A logarithmic scale; values are positive."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> tuple[float, ...]:
        """The powers of ten."""
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        return tuple(10.0**n for n in range(first, last + 1))


Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass
class Labels:
    """Places short texts next to points, where no other text or point is; texts without room are left out.

    Attributes:
        frame: box that no text may leave.
        taken: boxes that are in use.
        size: height of the letters, in units of the drawing.
    """

    frame: Box
    taken: list[Box] = field(default_factory=list)
    size: float = TEXT_SIZE

    def block(self, x: float, y: float, radius: float) -> None:
        """Keeps texts off a point."""
        self.taken.append((x - radius, y - radius, x + radius, y + radius))

    def place(self, x: float, y: float, radius: float, words: str) -> Markup | None:
        """The text to the right, left, above or below a point."""
        wide, high = text_width(words, self.size), self.size
        gap = radius + 4
        for left, middle in (
            (x + gap, y),
            (x - gap - wide, y),
            (x - wide / 2, y - gap - high / 2),
            (x - wide / 2, y + gap + high / 2),
            (x + gap * 0.7, y - gap - high * 0.2),
            (x + gap * 0.7, y + gap + high * 0.2),
        ):
            box = (left, middle - high / 2, left + wide, middle + high / 2)
            if _inside(box, self.frame) and not any(_meet(box, other) for other in self.taken):
                self.taken.append(box)
                return text(left, middle + 0.36 * high, words, class_="small")
        return None


def _inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def bounds(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest of some finite values."""
    found = [value for value in values if math.isfinite(value)]
    return min(found), max(found)
