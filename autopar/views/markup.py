"""HTML, SVG and MathML by function calls: text is escaped unless it is markup already."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

VOID = frozenset({"br", "hr", "link", "meta"})
# Control characters and halves of surrogate pairs cannot stand in a page, whatever a name holds.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Text that is markup already, so that its special characters are not escaped."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text as markup; markup stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. `stroke_width=2` is the attribute `stroke-width`, `class_` is `class`; None is left out."""
    written = "".join(
        f' {_attribute(key)}="{escape(_number(value))}"' for key, value in attributes.items() if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Markup:
    """Parts one after the other, each escaped where it is not markup."""
    return Markup(separator.join(escape(part) for part in parts if part is not None))


def json_script(document: Mapping[str, Any], identifier: str) -> Markup:
    """A document that scripts can read from the page; no text in it can end the element."""
    text = json.dumps(document, allow_nan=False, default=str)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", id=identifier)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _number(value: object) -> object:
    """Coordinates to a hundredth, which is more than a screen shows."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return value
