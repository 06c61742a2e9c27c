"""Text files that are written whole or not at all, and text that is read within bounds, whoever wrote it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import operator
import os
import re
import secrets
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import AutoparError, did_you_mean

MOST_BYTES = 64 * 2**20  # of a file that is read whole; plans of the largest models have a few megabytes
# Our own files have about ten levels; Python itself gives up at a thousand.
MOST_LEVELS = 100
OTHERS_WRITE = 0o022  # permissions by which the group and everyone else write a file
# A whole number within a regular expression: in digits of ASCII, of which `int` raises for thousands.
COUNT = "[0-9]{1,18}"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OTHER = bytes(sorted({*range(256)} - set(b"[]{}")))
# An opening bracket adds 2 and every bracket takes 1 away, so that the sum is the level.
_STEPS = bytes.maketrans(b"[{]}", bytes([2, 2, 0, 0]))


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, only_own: bool = False) -> str:
    """The text of a file. Raises OSError, and ValueError for a longer file or one that is no UTF-8.

    With `only_own` a file that another user could have written raises ValueError, too.
    """
    with Path(path).open("rb") as file:
        if only_own:
            _refuse_of_others(os.fstat(file.fileno()))
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes, which is the most that is read")
    return found.decode()


def _refuse_of_others(found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ValueError(f"it belongs to user {found.st_uid}, but this is user {os.geteuid()}")
    if found.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(f"its permissions are {mode:o}, so that other users can write it")


def check_nesting(text: str) -> None:
    """Raises ValueError for a JSON text with more than `MOST_LEVELS` lists and objects inside of each other."""
    brackets = _STRING.sub(b"", text.encode("utf-8", "surrogatepass")).translate(_STEPS, _OTHER)
    sums = map(operator.sub, itertools.accumulate(brackets), itertools.count(1))
    if max(sums, default=0) > MOST_LEVELS:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The values of a JSON file that another program has written. Raises OSError, and ValueError as `check_nesting`."""
    text = read_text(path)
    check_nesting(text)
    return json.loads(text)


def parse_json(text: str) -> Any:
    """The values of a JSON text of our own.

    Raises ValueError for a text that is no JSON, is nested too deeply, has a number that is not finite, or gives a
    name twice in one object; JSON does not say which of two equal names counts (RFC 8259, section 4).
    """
    check_nesting(text)
    return json.loads(text, object_pairs_hook=_each_once, parse_constant=_not_finite, parse_float=_finite)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} occurs {count} times in one place")
    return document


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def is_count(text: str) -> bool:
    """Whether a text is a whole number, see `COUNT`."""
    return re.fullmatch(COUNT, text) is not None


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


def check_keys(document: Mapping[str, Any], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raises ValueError unless an object has the keys that its format requires, and no unknown ones."""
    required, optional = tuple(required), tuple(optional)
    if unknown := unknown_key(document, (*required, *optional)):
        raise ValueError(f"it has the field {unknown}, which is unknown; remove or rename it")
    for key in required:
        if key not in document:
            raise ValueError(f"it has no field {key!r}")


def check_output(*paths: Path | None) -> None:
    """Raises AutoparError for a file that `write_whole` could not write, before any work is done for it."""
    for path in paths:
        if path is not None:
            with _naming(path):
                target, _ = _target(path)
                with tempfile.TemporaryFile(dir=target.parent):
                    pass


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Calls `write_whole`; if it fails, raises AutoparError with the file and the reason."""
    with _naming(Path(path)):
        write_whole(text, Path(path))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context in which an OSError becomes an AutoparError that says which file cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise AutoparError(f"Cannot write {path}: {error.strerror or error}.") from error


def write_whole(text: str, path: Path, *, without: int = 0) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one.

    A file that is there keeps its permissions; a new one has those that the umask allows. Where the path is a symbolic
    link, the file to which it leads is written. Raises OSError, also for what is not a regular file.

    Args:
        text: contents of the file.
        path: path of the file.
        without: permissions that the file does not get whatever the umask, such as `OTHERS_WRITE`.
    """
    target, mode = _target(path)
    # Not by `tempfile`, whose files are for their owner alone whatever the umask.
    beside = target.with_name(f".{target.stem}-{secrets.token_hex(8)}")
    with open(beside, "x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            own = os.fstat(file.fileno()).st_mode if mode is None else mode
            os.fchmod(file.fileno(), stat.S_IMODE(own) & ~without)
            os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink()
            raise


def _target(path: Path) -> tuple[Path, int | None]:
    """The file to which a path leads, and its permissions; None for one that is not there yet."""
    target = Path(os.path.realpath(path))
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}")
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    if not stat.S_ISREG(mode):
        what = next((word for is_one, word in _KINDS if is_one(mode)), "no regular file")
        raise OSError(errno.EINVAL, f"it is {what}")
    return target, stat.S_IMODE(mode) & 0o777


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
