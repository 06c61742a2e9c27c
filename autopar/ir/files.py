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
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from autopar.errors import AutoparError, did_you_mean

# Of a file that is read whole. Plans of the largest models have a few megabytes; values take up to 22 times as much.
MOST_BYTES = 32 * 2**20
# Our own files have about ten levels; Python itself gives up at a thousand.
MOST_LEVELS = 100
OTHERS_WRITE = 0o022  # permissions by which the group and everyone else write a file
# A whole number within a regular expression: in digits of ASCII, of which `int` raises for thousands.
COUNT = "[0-9]{1,18}"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # what may be half of a character in JSON
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OTHER = bytes(sorted({*range(256)} - set(b"[]{}")))
# An opening bracket adds 2 and every bracket takes 1 away, so that the sum is the level.
_STEPS = bytes.maketrans(b"[{]}", bytes([2, 2, 0, 0]))


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, only_own: bool = False) -> str:
    """The text of a regular file. Raises OSError, and ValueError for a longer file or one that is no UTF-8.

    With `only_own` a file that another user could have written raises ValueError, too.
    """
    with open_regular(path) as file:
        if only_own:
            _refuse_of_others(os.fstat(file.fileno()))
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes, which is the most that is read")
    return found.decode()


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a regular file for reading. Raises OSError, also for a pipe or a device, which could be waited for."""
    # Without O_NONBLOCK the opening itself waits for somebody who writes into a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        _refuse_irregular(os.fstat(file.fileno()).st_mode)
        yield file


def _refuse_irregular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = next((word for is_one, word in _KINDS if is_one(mode)), "no regular file")
        raise OSError(errno.EINVAL, f"it is {what}")


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
    return _of_whole_characters(json.loads(text), text)


def parse_json(text: str) -> Any:
    """The values of a JSON text of our own.

    Raises ValueError for a text that is no JSON, is nested too deeply, has a number that is not finite as a float, has
    half of a character, or gives a name twice in one object; JSON does not say which of two equal names counts
    (RFC 8259, section 4).
    """
    check_nesting(text)
    numbers: dict[str, Any] = {"parse_constant": _not_finite, "parse_float": _finite, "parse_int": _whole}
    return _of_whole_characters(json.loads(text, object_pairs_hook=_each_once, **numbers), text)


def _of_whole_characters(values: Any, text: str) -> Any:
    r"""The values of a JSON text. Raises ValueError where a `\uD800` stands alone, which no file or screen takes."""
    if _HALF.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it has {error.object[error.start]!a}, which is half of a character") from None
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} occurs {count} times in one place")
    return document


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text)


def _whole(text: str) -> int:
    number = int(text)
    return number if is_number(number) else _not_finite(f"{text[:20]}... of {len(text)} digits")


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a finite number")


def is_number(value: object) -> bool:
    """Whether a value is a finite number: no truth value, and no whole number beyond every float.

    >>> is_number(2.5), is_number(10**400), is_number(float("nan")), is_number(True)
    (True, False, False, False)
    """
    # math.isfinite raises OverflowError for a large whole number.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


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
                target, _ = _target(path, follows=True)
                with tempfile.TemporaryFile(dir=target.parent):
                    pass


def save_text(text: str, path: str | os.PathLike[str]) -> None:
    """Calls `write_whole`; if it fails, raises AutoparError with the file and the reason."""
    with _naming(Path(path)):
        write_whole(text, Path(path))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context in which an error becomes an AutoparError that says which file cannot be written, and why."""
    try:
        yield
    except (OSError, ValueError) as error:  # of a text or name that has half of a character, or a null byte
        raise AutoparError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error


def write_whole(text: str, path: Path, *, without: int = 0, follows: bool = True) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one.

    A file that is there keeps its permissions; a new one has those that the umask allows. Raises OSError, also for what
    is not a regular file; UnicodeEncodeError for a text with half of a character.

    Args:
        text: contents of the file.
        path: path of the file.
        without: permissions that the file does not get whatever the umask, such as `OTHERS_WRITE`.
        follows: whether, where the path is a symbolic link, the file to which it leads is written; else the link is
            replaced, as in a folder where others may have made it.
    """
    target, mode = _target(path, follows=follows)
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


def _target(path: Path, *, follows: bool) -> tuple[Path, int | None]:
    """The file to be replaced for a path, and its permissions; None for one that is not there yet."""
    target = Path(os.path.realpath(path)) if follows else path
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}")
    try:
        # Of the path as it is given: so the system refuses links that others made in a folder for everyone (such as
        # /tmp), which os.replace would not.
        mode = path.stat(follow_symlinks=follows).st_mode
    except FileNotFoundError:
        return target, None
    if stat.S_ISLNK(mode):
        return target, None
    _refuse_irregular(mode)
    return target, stat.S_IMODE(mode) & 0o777


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)
