"""A thread that leaves the processor to training.

[Note: a save leaves the processor to the step] Where ranks train on processors, each has a core or a part. A thread
that copies to the disk's cache gets as much of it as the thread that trains, and the step after a save takes twice its
time. So the thread rests after every piece of work, and has a small share of a core. Nobody waits for it meanwhile; as
soon as somebody does, it rests no more.
"""

from __future__ import annotations

import threading
import time

_LOOK_SECONDS = 0.1  # between two looks whether the script has ended, which then waits for the thread


class Pace:
    """The pace of one thread; its work calls `rest` after every piece.

    Args:
        share: fraction of a core that the thread uses at most, above 0; 1 for no rest.
        seconds: seconds from now after which it rests no more, because others wait for it in the end.
    """

    def __init__(self, share: float, seconds: float) -> None:
        self._end_seconds = time.monotonic() + seconds
        self._rests = 1 / share - 1  # seconds of rest for a second of work
        self._spent_seconds = 0.0  # processor time of the thread up to its last rest
        self._hurry = threading.Event()

    def rest(self) -> None:
        """Sleeps in proportion to the thread's CPU time since the last rest, unless it has to hurry."""
        rest_seconds = self._rests * (time.thread_time() - self._spent_seconds)
        end_seconds = min(time.monotonic() + rest_seconds, self._end_seconds)
        while threading.main_thread().is_alive():
            left_seconds = min(end_seconds - time.monotonic(), _LOOK_SECONDS)
            if left_seconds <= 0 or self._hurry.wait(left_seconds):
                break
        self._spent_seconds = time.thread_time()

    def hurry(self) -> None:
        """Ends all rests, from another thread."""
        self._hurry.set()
