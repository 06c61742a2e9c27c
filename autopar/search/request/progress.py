"""Progress messages of a search, for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]  # is called with a line of text when a part of the search begins


def silent(message: str) -> None:
    """Shows nothing."""
