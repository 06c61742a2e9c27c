"""Colours, given to names in order, so that one thing has one colour in all of a report.

Every colour comes with the ink that can be read on it (contrast of 4.5 or more), a terminal colour,
and a pattern that tells the parts of a bar apart where there is no colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Colour(NamedTuple):
    """A fill colour, with the colours and characters that match it.

    Attributes:
        fill: colour of an area, as #rrggbb; it stands out from white and from near-black alike.
        ink: colour of text on the area.
        terminal: name of the nearest terminal colour.
        glyph: character that draws a bar in a terminal.
        ascii_glyph: the same where only ASCII can be printed.
    """

    fill: str
    ink: str
    terminal: str
    glyph: str
    ascii_glyph: str


PALETTE = (
    Colour("#3a6fd8", "#ffffff", "blue", "█", "#"),
    Colour("#e3a008", "#1c1400", "yellow", "▒", "="),
    Colour("#0d8073", "#ffffff", "cyan", "▓", "+"),
    Colour("#cf4a2a", "#ffffff", "red", "░", ":"),
    Colour("#7d58c9", "#ffffff", "magenta", "▚", "%"),
    Colour("#63b3e6", "#0a1d2b", "bright_blue", "▄", "o"),
    Colour("#be4b86", "#ffffff", "bright_magenta", "▀", "x"),
    Colour("#93ad2c", "#161b00", "green", "▐", "@"),
)
REST = Colour("#8b919b", "#14161a", "bright_black", "▖", "-")  # for the ninth and later, and gaps

COMPUTE = PALETTE[0]


def in_order(names: Iterable[str]) -> dict[str, Colour]:
    """The colours of a bar's parts."""
    given = dict(enumerate(PALETTE))
    return {name: given.get(i, REST) for i, name in enumerate(dict.fromkeys(names))}


def of_axes(axes: Iterable[str]) -> dict[str, Colour]:
    """The colours of mesh axes; compute has the first one of the palette."""
    return in_order(("compute", *axes))


def with_axes(parts: Iterable[str], axes: Mapping[str, Colour]) -> dict[str, Colour]:
    """The colours of the parts of a step or its traffic: parts that name an axis have its colour."""
    found = {part: _named(part, axes) for part in parts}
    taken = {colour for colour in found.values() if colour is not None} | {COMPUTE}
    free = iter(colour for colour in PALETTE if colour not in taken and colour not in axes.values())
    return {part: colour or next(free, REST) for part, colour in found.items()}


def _named(part: str, axes: Mapping[str, Colour]) -> Colour | None:
    words = part.lower().replace("(", " ").replace(")", " ").replace(",", " ").split()
    return next((colour for name, colour in axes.items() if name.lower() in words), None)
