"""Prints a few lines to stderr, each once, if the application has not configured logging."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from autopar.runtime.ranks.all_ranks import is_first

log = logging.getLogger("autopar")


@contextlib.contextmanager
def heard(hint: str = "") -> Iterator[None]:
    """Context that shows autopar's log messages of level INFO on stderr, which Python hides by default.

    It does nothing if logging is configured: if the logger `autopar` has a level, or it or the root logger has a
    handler. Only the first rank shows messages.

    Args:
        hint: line that ends what is shown by this context; "" for none.
    """
    if not is_first() or log.level != logging.NOTSET or log.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
        if hint:
            log.info("%s", hint)
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def say(message: str, *values: object) -> None:
    """Logs a message of level INFO on the first rank only, for a message that all ranks would log."""
    if is_first():
        log.info(message, *values)
