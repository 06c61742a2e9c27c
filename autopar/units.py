"""Numbers for people: three digits and a unit. Inside, everything is bytes, seconds and FLOPs."""

from __future__ import annotations

import math
import re

from autopar.errors import AutoparError

_SIZES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SMALLEST_BYTES = 1e6  # less is a number whose unit was forgotten
_LARGE = ("", "k", "M", "G", "T", "P", "E")
_SMALL = ("", "m", "µ", "n")


def format_bytes(size_bytes: float) -> str:
    """Bytes in powers of 1000.

    >>> format_bytes(1_500_000)
    '1.50 MB'
    """
    value, prefix = _scaled(size_bytes, _LARGE)
    if not prefix and math.isfinite(value):
        return f"{round(value)} bytes"
    return f"{_digits(value)} {prefix}B"


def parse_bytes(text: str) -> int:
    """The size of a memory that a person writes as a number with or without a unit; GB is 1e9 bytes.

    >>> parse_bytes("70GB"), parse_bytes("640 MB"), parse_bytes("70e9")
    (70000000000, 640000000, 70000000000)

    Raises AutoparError for another text, and for less than a megabyte.
    """
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?b)?\s*", text, re.IGNORECASE | re.ASCII)
    try:
        size = float(found[1]) * _SIZES[(found[2] or "b").lower()] if found else 0.0
    except ValueError:
        size = 0.0
    if not _SMALLEST_BYTES <= size < math.inf:
        raise AutoparError(f"{text!r} is not a size of a memory; write 70GB.")
    return int(size)


# Characters that a terminal obeys, but for the line break; also those that turn the direction of reading.
_OBEYED = {*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {10}
# Halves of characters, as Python has them for bytes of a file's name that are no UTF-8; no stream takes them.
_HALVES = range(0xD800, 0xE000)
_SHOWN = {code: ascii(chr(code))[1:-1] for code in (*_OBEYED, *_HALVES)}


def printable(text: str) -> str:
    r"""A text in which characters that a terminal would obey, or not take, are shown as Python writes them.

    >>> printable("a name\x1b[31m")
    'a name\\x1b[31m'
    """
    return text.translate(_SHOWN)


def format_seconds(seconds: float) -> str:
    """Seconds with a prefix.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    if 0 < abs(seconds) < 1:
        return f"{_shrunk(seconds)}s"
    return f"{_digits(seconds)} s"


def format_flops(flops_per_second: float) -> str:
    """A rate of arithmetic.

    >>> format_flops(989e12)
    '989 TFLOP/s'
    """
    value, prefix = _scaled(flops_per_second, _LARGE)
    return f"{_digits(value)} {prefix}FLOP/s"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth.

    >>> format_rate(3.35e12)
    '3.35 TB/s'
    """
    value, prefix = _scaled(bytes_per_second, _LARGE)
    return f"{_digits(value)} {prefix}B/s"


def format_count(count: float) -> str:
    """A number of things.

    >>> format_count(124_439_808)
    '124 M'
    """
    value, prefix = _scaled(count, _LARGE)
    return f"{_digits(value)} {prefix}" if prefix else str(round(value))


def counted(number: int, word: str) -> str:
    """A number with its noun.

    >>> counted(1, "micro-batch"), counted(2, "micro-batch")
    ('1 micro-batch', '2 micro-batches')
    """
    plural = f"{word}es" if word.endswith(("ch", "s", "x")) else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


def format_share(part: float, whole: float) -> str:
    """A part of a whole in percent; a part too small to show is `<0.1 %`, not zero.

    >>> format_share(1, 8), format_share(1, 10_000)
    ('12.5 %', '<0.1 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<0.1 %"
    return f"{share:.1f} %"


def format_change(relative: float) -> str:
    """A relative change with its sign.

    >>> format_change(0.0063)
    '+0.630 %'
    """
    if abs(relative) < 5e-6:
        return "0 %"
    return f"{100 * relative:+.3f} %"


def format_as(unit: str, value: float) -> str:
    """A value in "bytes" or "seconds".

    >>> format_as("seconds", 0.0123)
    '12.3 ms'
    """
    return format_bytes(value) if unit == "bytes" else format_seconds(value)


def _scaled(value: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    """The value between 1 and 999.5 and the prefix that makes up for it."""
    for prefix in prefixes[:-1]:
        if abs(value) < 999.5 or not math.isfinite(value):
            return value, prefix
        value /= 1000
    return value, prefixes[-1]


def _shrunk(value: float) -> str:
    for prefix in _SMALL:
        if abs(value) >= 0.9995:
            return f"{_digits(value)} {prefix}"
        value *= 1000
    return f"{_digits(value / 1000)} {_SMALL[-1]}"


def _digits(value: float) -> str:
    """Three significant digits below 1000, and whole numbers above; zero is `0`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:.{min(decimals, 6)}f}"
