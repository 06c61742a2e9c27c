"""The function that Python calls whenever another one is called, set for a while."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

Profile = Callable[[types.FrameType, str, Any], object]


@contextlib.contextmanager
def profiled_by(function: Profile | None) -> Iterator[None]:
    """Inside, `function` is called at every call, or nothing; afterwards what was before.

    cProfile shows itself as an object that cannot be called, and is switched on again.
    """
    before: Any = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            sys.setprofile(None)
            before.enable()
