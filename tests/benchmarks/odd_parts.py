"""Parts that raise, hang, die or count their calls, for tests of the runner."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.accelerator.figures import Figure
from benchmarks.accelerator.parts import Context, Found, Part

FIRST = Figure("what came first", 1.0, "count", limit=1)


def odd_part(name: str) -> Part:
    """The part of this name, a function of this module."""
    return Part(name, "?", f"{__name__}:{name}", share=1.0)


def raises(context: Context) -> Iterator[Found]:
    yield FIRST
    raise RuntimeError("a kernel is missing")


def hangs(context: Context) -> Iterator[Found]:
    (context.folder / "pid").write_text(str(os.getpid()))
    yield FIRST
    time.sleep(600)


def dies(context: Context) -> Iterator[Found]:
    yield FIRST
    os.kill(os.getpid(), signal.SIGSEGV)


def counts(context: Context) -> Iterator[Found]:
    """Adds a line to a file at each call, and takes a second for each of two figures."""
    with Path(context.folder, "calls").open("a") as calls:
        calls.write("called\n")
    yield FIRST
    time.sleep(1)
    yield Figure("what came second", 2.0, "count")


def fails(context: Context) -> Iterator[Found]:
    yield Figure("a ratio", 1.5, "ratio", limit=1.0)
