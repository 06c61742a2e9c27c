"""Prints a few lines to stderr, each once, if the application has not configured logging."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from autopar.runtime.ranks.all_ranks import is_first

log = logging.getLogger("autopar")


@contextlib.contextmanager
def heard(hint: str = "") -> Iterator[None]:
    """Shows on stderr what autopar logs at INFO inside of the context, which Python by itself hides.

    Not where logging is set up: if the logger `autopar` has a level, or it or the root logger has a handler, that says
    what is shown and where. Other ranks than the first show nothing.

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
    """Logs at INFO what every rank would say, from the first one alone."""
    if is_first():
        log.info(message, *values)
