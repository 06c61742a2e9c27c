"""The line that a notebook shows under its cell while a model is planned."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console

from autopar.search.request.progress import Progress, silent
from autopar.units import format_seconds


@contextlib.contextmanager
def shown_planning() -> Iterator[Progress]:
    """A function that replaces the text of one line under the cell; outside of a notebook it shows nothing.

    The line ends with the duration of what ran inside of the context.
    """
    if not Console().is_jupyter:
        yield silent
        return
    from IPython.display import display  # only a notebook has it

    start_seconds = time.perf_counter()
    line = display({"text/plain": "autopar"}, raw=True, display_id=True)

    def show(message: str) -> None:
        line.update({"text/plain": f"autopar: {message}"}, raw=True)

    yield lambda message: show(f"{message} ...")
    show(f"planned in {format_seconds(time.perf_counter() - start_seconds)}")
