"""Collects garbage less often while a model is captured or planned, since nearly all new objects stay alive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects before a collection; collections of the youngest before one of the next older, twice.
_RARELY = (50_000, 50, 50)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Context in which Python collects garbage less often, unless the caller has set higher thresholds already.

    Torch alone makes a million objects, which a full collection visits. With Python's own thresholds, collections took
    a twelfth of the time of a capture and of a search, and found hardly anything.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _RARELY[0]:  # or another thread has set them, and puts its own back
        yield
        return
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
