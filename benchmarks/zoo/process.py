"""Work in forked processes, bounded in processor time, in memory and by the clock."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence

OVER_TIME = (signal.SIGXCPU, signal.SIGKILL)  # what the system ends a process with
CLOCK = 4  # the bound by the clock is so many times that on processor time, which a busy machine does not use up


class Task:
    """Functions that run each in a process of its own, forked from this one, until all have ended.

    Args:
        works: what to run; a function that raises ends its process with status 1.
        seconds: processor time that each may take.
        memory_bytes: data that each may hold.
    """

    def __init__(self, works: Sequence[Callable[[], None]], seconds: float, memory_bytes: int) -> None:
        self.start_seconds = time.perf_counter()
        self.seconds = seconds
        self._statuses: dict[int, int | None] = {_fork(work, int(seconds), memory_bytes): None for work in works}

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self.start_seconds

    def ended(self) -> bool:
        """Whether all processes have; those whose time by the clock is over are ended, and so are the
        others once one has failed: they may wait for it."""
        for pid in self._left():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._statuses[pid] = status
        if self.elapsed_seconds > CLOCK * self.seconds or any(self._statuses.values()):
            self._end()
        return not self._left()

    def wait(self) -> None:
        while not self.ended():
            time.sleep(0.02)

    @property
    def failure(self) -> str:
        """Why a process did not end well, "" if all did."""
        status = next((status for status in self._statuses.values() if status), 0)
        if not status:
            return ""
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in OVER_TIME
        return f"took over {self.seconds:.0f} s" if late else f"ended with status {status}"

    def _left(self) -> list[int]:
        return [pid for pid, status in self._statuses.items() if status is None]

    def _end(self) -> None:
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)
            self._statuses[pid] = os.waitpid(pid, 0)[1]


def _fork(work: Callable[[], None], seconds: int, memory_bytes: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
