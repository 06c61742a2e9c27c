"""Sets the function that Python calls at every function call (`sys.setprofile`) for a while."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

Profile = Callable[[types.FrameType, str, Any], object]


@contextlib.contextmanager
def profiled_by(function: Profile | None) -> Iterator[None]:
    """Context in which Python calls `function` at every call, or nothing for None; the earlier one is set again after.

    cProfile shows itself as an object that cannot be called, and is switched on again. What others have the garbage
    collector call waits until the end: it runs at any moment, and is no call of what is watched.
    """
    before: Any = sys.getprofile()
    callbacks, gc.callbacks[:] = [*gc.callbacks], []
    sys.setprofile(function)
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            sys.setprofile(None)
            before.enable()
