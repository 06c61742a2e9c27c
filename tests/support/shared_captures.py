"""Captures that all processes of a test session share: one of them captures, the others read its text.

Ranks that train one model would otherwise trace it once each. The text is that of `autopar.planning.stored_captures`:
its key says all that a capture depends on, and it is compared with the capture before it is stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.api import planner
from autopar.capture.captured import Captured
from autopar.planning.stored_captures import CaptureQuestion, StoredCaptures
from tests.support.session import CAPTURES

WAIT_SECONDS = 30  # for the process that makes the same capture
_POLL_SECONDS = 0.02


def share_captures() -> None:
    """From now on all of this process's captures that no folder is named for are those of the session."""
    planner.StoredCaptures = _shared_unless_named  # type: ignore[misc, assignment]


def _shared_unless_named(folder: Path | None) -> StoredCaptures | SharedCaptures:
    return SharedCaptures.of_session() if folder is None else StoredCaptures(folder)


@dataclass(frozen=True)
class SharedCaptures:
    """A folder of captures for processes that ask at once; a stand-in for StoredCaptures."""

    folder: Path | None

    @classmethod
    def of_session(cls) -> SharedCaptures:
        folder = os.environ.get(CAPTURES)
        return cls(None if folder is None else Path(folder))

    def captured(self, question: CaptureQuestion, capture: Callable[[], Captured]) -> Captured:
        """The capture of the first process that has asked the question, or else that of `capture()`."""
        if self.folder is None:
            return capture()
        stored = StoredCaptures(self.folder)
        try:
            found = stored.captured(question, _refuse)
        except _NotStored:
            with self._turn(question):
                found = stored.captured(question, capture)
        # No test is to see which of the processes has captured.
        return replace(found, is_stored=False)

    @contextlib.contextmanager
    def _turn(self, question: CaptureQuestion) -> Iterator[None]:
        """Waits while another process captures for the first time what may be stored."""
        try:
            key = question.key(question.state())
        except Exception:  # as in StoredCaptures: nothing is stored
            yield
            return
        assert self.folder is not None
        with (self.folder / f"{key}.lock").open("a") as file:
            if file.tell() == 0:
                _lock(file)
            yield
            file.write("captured")


class _NotStored(Exception):
    """Nothing is stored yet."""


def _refuse() -> Captured:
    raise _NotStored


def _lock(file: Any) -> None:
    """Locks a file as soon as no other process has it, which does so when that process ends, too; or gives up."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_SECONDS)
