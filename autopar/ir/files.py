"""Text files that are written whole or not at all, and text that is read within bounds, whoever wrote it."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import did_you_mean

MOST_BYTES = (
    64 * 2**20
)  # of a file that is read whole; plans of the largest models have a few megabytes
# Our own files have about ten levels; Python itself gives up at a thousand.
MOST_LEVELS = 100
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OTHER = bytes(sorted({*range(256)} - set(b"[]{}")))
# An opening bracket adds 2 and every bracket takes 1 away, so that the sum is the level.
_STEPS = bytes.maketrans(b"[{]}", bytes([2, 2, 0, 0]))


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file. Raises OSError, and ValueError for a longer file or one that is no UTF-8."""
    with Path(path).open("rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes, which is the most that is read")
    return found.decode()


def check_nesting(text: str) -> None:
    """Raises ValueError for a JSON text with more than `MOST_LEVELS` lists and objects inside of each other."""
    brackets = _STRING.sub(b"", text.encode("utf-8", "surrogatepass")).translate(_STEPS, _OTHER)
    sums = map(operator.sub, itertools.accumulate(brackets), itertools.count(1))
    if max(sums, default=0) > MOST_LEVELS:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def parse_json(text: str) -> Any:
    """The values of a JSON text of our own.

    Raises ValueError for a text that is no JSON, is nested too deeply, has a number that is not finite, or gives a
    name twice in one object; JSON does not say which of two equal names counts (RFC 8259, section 4).
    """
    check_nesting(text)
    return json.loads(
        text, object_pairs_hook=_each_once, parse_constant=_not_finite, parse_float=_finite
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} stands {count} times in one place")
    return document


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


def unknown_key(found: Iterable[str], known: Iterable[str]) -> str:
    """The first key that a format does not have, with the nearest that it has; "" where it has all of them.

    >>> unknown_key(["mesh", "precison"], ["mesh", "precision"])
    "'precison' (did you mean precision?)"
    """
    known = tuple(known)
    for key in found:
        if key not in known:
            return f"{key!r}{did_you_mean(key, known)}"
    return ""


def check_keys(
    document: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Raises ValueError unless an object has the keys that its format requires, and no unknown ones."""
    required, optional = tuple(required), tuple(optional)
    if unknown := unknown_key(document, (*required, *optional)):
        raise ValueError(f"it has the field {unknown}, which is unknown; remove or rename it")
    for key in required:
        if key not in document:
            raise ValueError(f"it has no field {key!r}")


def write_whole(text: str, path: Path) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one. Raises OSError."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.stem}-", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # that of temporary files is for their owner alone
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
