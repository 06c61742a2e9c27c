"""Watches what reading a file or a command may not do: run code, raise what no person can read, take long or much."""

from __future__ import annotations

import gc
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

# Of a processor, so that what else a machine does changes no result.
LIMIT_SECONDS = 30.0

# By the clock, what waits and computes nothing has so many times the limit.
_WAITS = 10
LIMIT_BYTES = 10**9
_CODE = frozenset(
    ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "ctypes.dlopen")
)


class NoAnswer(BaseException):
    """The time is over; no `except Exception` of a reader catches it."""


@dataclass(frozen=True)
class Seen:
    """What happened.

    Attributes:
        value: the result; None where an error was raised.
        error: the error; None without one.
        ran: names of the audit events that are code of a file.
        seconds: time of the processor.
        grown_bytes: growth of the most memory that the process has had.
    """

    value: Any
    error: BaseException | None
    ran: tuple[str, ...]
    seconds: float
    grown_bytes: int

    def faults(self, allowed: tuple[type[BaseException], ...]) -> list[str]:
        """The kinds of what may not happen, see `KINDS`."""
        found = ["code run"] if self.ran else []
        if isinstance(self.error, NoAnswer):
            found.append("no answer")
        elif self.error is not None and not isinstance(self.error, allowed):
            found.append("raw traceback")
        if self.grown_bytes > LIMIT_BYTES:
            found.append("memory")
        return found

    @property
    def where(self) -> str:
        """The last lines of the error's traceback."""
        if self.error is None:
            return ""
        frames = traceback.extract_tb(self.error.__traceback__)[-3:]
        places = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames))
        return f"{type(self.error).__name__}: {str(self.error)[:200]} ({places})"


KINDS = ("code run", "raw traceback", "silent change", "no answer", "memory")


class Watch:
    """Watches calls in this process. There is one, since Python never takes an audit hook away."""

    def __init__(self) -> None:
        self._ran: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: Any) -> None:
        if event in _CODE:
            self._ran.append(event)

    def call(self, work: Callable[[], Any]) -> Seen:
        """Calls and watches a function."""
        self._ran.clear()
        before, start = _most_bytes(), time.process_time()
        value = error = None
        try:
            with _limited():
                value = work()
        except (Exception, NoAnswer, SystemExit) as raised:
            error = raised
        seconds = time.process_time() - start
        return Seen(value, error, tuple(self._ran), seconds, _most_bytes() - before)


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _limited() -> Iterator[None]:
    """Context that raises NoAnswer after `LIMIT_SECONDS`."""

    def over(number: int, frame: FrameType | None) -> NoReturn:
        raise NoAnswer(f"no answer within {LIMIT_SECONDS:g} s")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, _WAITS * LIMIT_SECONDS),
    )
    before = [(number, timer, signal.signal(number, over)) for number, timer, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, handler in before:
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        gc.collect(0)
