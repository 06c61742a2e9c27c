"""Mutations of a file: bytes, and the values of a JSON text. Each is drawn from a generator with a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_WILD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    10**400,
    1e308,
    "\ud800",
    "",
    "x" * 10_000,
    "\x1b[2J",
    "[bold]x[/nope]",
    [],
    {},
    [[]],
    {"a": {}},
    "٣",
    "__import__('os').system('id')",
    "../../etc/passwd",
    "nan",
    "\n",
    "\x00",
)
_PIECES = (
    b"{",
    b"[",
    b'"',
    b"}",
    b"\x00",
    b"\xff\xfe",
    b"NaN",
    b"1e999",
    b"Infinity",
    b"-1",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"9" * 5000,
    b"9" * 400,
    b"\xef\xbb\xbf",
    b"\\ud800",
    b"__import__('os').system('id')",
    b"\r",
    b"\n",
    b"\x1b[31m",
    b"cos\nsystem\n(S'id'\ntR.",
    b"../",
)


def flip(content: bytes, draw: random.Random) -> bytes:
    """The bytes with one bit turned."""
    changed = bytearray(content)
    if changed:
        bit = draw.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _place(content: bytes, draw: random.Random) -> int:
    """A place in a file; every other one is near its begin, where headers are."""
    return draw.randrange(min(len(content), 2000) if draw.random() < 0.5 else len(content))


def cut(content: bytes, draw: random.Random) -> bytes:
    """The beginning of the bytes."""
    return content[: _place(content, draw)]


def insert(content: bytes, draw: random.Random) -> bytes:
    """The bytes with a wild piece in them."""
    at = _place(content, draw)
    return content[:at] + draw.choice(_PIECES) + content[at:]


def overwrite(content: bytes, draw: random.Random) -> bytes:
    """The bytes with a wild piece in place of as many."""
    at, piece = _place(content, draw), draw.choice(_PIECES)
    return content[:at] + piece + content[at + len(piece) :]


def copy_piece(content: bytes, draw: random.Random) -> bytes:
    """The bytes with a piece of their own at another place, too."""
    begin, at = _place(content, draw), _place(content, draw)
    return content[:at] + content[begin : begin + draw.randrange(1, 200)] + content[at:]


def drop_piece(content: bytes, draw: random.Random) -> bytes:
    """The bytes without some of them."""
    at = _place(content, draw)
    return content[:at] + content[at + draw.randrange(1, 100) :]


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    flip,
    flip,
    cut,
    insert,
    overwrite,
    copy_piece,
    drop_piece,
)


def change_value(content: bytes, draw: random.Random) -> bytes:
    """A JSON text with a wild value, a renamed, dropped or further key, at a place drawn among all."""
    document = json.loads(content)
    holders = [x for x in _holders(document) if x]
    if not holders:
        return flip(content, draw)
    holder = draw.choice(holders)
    key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    how = draw.choice(("value", "value", "drop", "rename", "further"))
    if how == "value" or isinstance(holder, list):
        holder[key] = draw.choice(_WILD)
    elif how == "further":
        holder[f"{key}s"] = draw.choice(_WILD)
    else:
        value = holder.pop(key)
        if how == "rename":
            holder[draw.choice((f"{key} ", key.upper(), key[:-1], "\x1b[1m", f"{key}\n"))] = value
    return json.dumps(document).encode()


def _holders(value: Any) -> list[Any]:
    """The lists and objects in a value."""
    if isinstance(value, dict):
        return [value, *(x for each in value.values() for x in _holders(each))]
    if isinstance(value, list):
        return [value, *(x for each in value for x in _holders(each))]
    return []


def mutated(content: bytes, draw: random.Random, *, is_json: bool) -> bytes:
    """The bytes after one to three mutations."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if is_json and draw.random() < 0.6:
            try:
                content = change_value(content, draw)
                continue
            except (ValueError, RecursionError):
                pass
        content = draw.choice(BYTES)(content, draw) if content else b"\x00"
    return content
