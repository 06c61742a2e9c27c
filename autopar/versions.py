"""The version of the package, and the versions of torch that it is tested with. No other place says them."""

from __future__ import annotations

import functools
import os
import re
import warnings

from autopar.errors import AutoparError

# pyproject.toml and the command line read it here.
VERSION = "0.1.0"

# Major and minor number.
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


@functools.cache
def check_torch() -> None:
    """Compares the installed torch with those that autopar is tested with, without loading it.

    One that is newer than all of them gives a warning, on the first rank. One that is older than all of them gives an
    AutoparError.
    """
    from importlib import metadata  # which `import autopar` need not wait for

    found = metadata.version("torch")
    number = _number(found)
    if number < OLDEST_TORCH:
        raise AutoparError(
            f"autopar needs torch {_text(OLDEST_TORCH)} or newer, but torch {found} is installed. "
            f"Install a newer one: pip install 'torch>={_text(OLDEST_TORCH)}'"
        )
    if number > NEWEST_TORCH and os.environ.get("RANK", "0") == "0":
        major, minor = NEWEST_TORCH
        warnings.warn(
            f"autopar is tested with torch {_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}, but torch {found} is "
            "installed. If a step or a compilation fails, install one that is tested: "
            f"pip install 'torch<{major}.{minor + 1}'",
            stacklevel=3,
        )


def _number(version: str) -> tuple[int, int]:
    """The major and the minor number of a version such as `2.15.0+cpu`."""
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
