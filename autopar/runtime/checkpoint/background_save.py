"""A save that goes on in a thread while the ranks train.

Collectives of two threads would mix, so that the ranks meet through the store of the process group: every rank says
there that its file is written, or why it is not, and the first rank gives the checkpoint its name when all have.

[Note: a save leaves the processor to the step] Where ranks train on processors, each has a core or a part. A thread
that copies to the disk's cache gets as much of it as the thread that trains, and the step after a save takes twice its
time. So the thread rests after every piece of work, and has a small share of a core. Nobody waits for it meanwhile; as
soon as somebody does, it rests no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.checkpoint_saving import Save
from autopar.runtime.ranks.all_ranks import AllRanks

_TICK_SECONDS = 0.05  # between two looks at the store
# Share of a core for the thread: where a step has the rest of the core it takes 1.04 of its time.
_SHARE = 1 / 24
_RESTING = 0.25  # of the time that the first rank waits for files; then the thread rests no more
_LOOK_SECONDS = 0.1  # between two looks whether the script has ended, which then waits for the thread
_PATIENCE_SECONDS = 20.0  # that the first rank still waits for the others when its script has ended


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


class BackgroundSave:
    """Writes this rank's file in a thread; on the first rank the thread also waits for the others, and commits.

    Args:
        ranks: all ranks.
        save: the save, which has begun and is staged.
        then: what the first rank does after the commit.
        timeout_seconds: seconds that the first rank waits for the files of the others.
        on_host: whether the ranks train on processors, to which the thread then leaves them, see
            [Note: a save leaves the processor to the step].
    """

    def __init__(
        self, ranks: AllRanks, save: Save, then: Callable[[], None], timeout_seconds: float, *, on_host: bool
    ) -> None:
        self._ranks, self._save, self._then = ranks, save, then
        self._timeout_seconds = timeout_seconds
        self._store = _store_of_a_save(ranks)
        self._problem = ""
        self._pace = Pace(_SHARE, _RESTING * timeout_seconds) if on_host else None
        # No daemon: a script that ends lets the last save end.
        self._thread = threading.Thread(target=self._run, name="autopar-save")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the save; every rank calls it. Raises AutoparError on every rank if it failed on any."""
        if self._pace is not None:
            self._pace.hurry()
        self._thread.join()
        for rank, problem in enumerate(self._ranks.everyones(self._problem)):
            if problem:
                raise AutoparError(f"{self._ranks.doing} failed on rank {rank}. {problem}")

    def _run(self) -> None:
        rest = self._pace.rest if self._pace is not None else None
        self._problem = _problem_of(lambda: self._save.write(rest))
        if self._store is not None:
            with_store = _problem_of(lambda: self._say(self._problem))
            self._problem = self._problem or with_store
        if self._ranks.first and not self._problem:
            self._problem = _problem_of(self._complete)

    def _complete(self) -> None:
        self._wait_for_others()
        self._save.commit()
        self._then()

    def _say(self, problem: str) -> None:
        assert self._store is not None
        self._store.set(str(self._ranks.rank), problem or "written")

    def _wait_for_others(self) -> None:
        """Waits until all ranks have written. Raises AutoparError for one that has not, or failed."""
        if self._store is None:
            return
        missing = [str(rank) for rank in range(1, self._ranks.count)]
        deadline = time.monotonic() + self._timeout_seconds
        while missing := [key for key in missing if not self._store.check([key])]:
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
            if time.monotonic() > deadline:
                raise AutoparError(
                    f"Ranks {', '.join(missing[:8])} have not written their files in time: they died, or the disk is "
                    f"slow (timeout_seconds={self._timeout_seconds:g})."
                )
            time.sleep(_TICK_SECONDS)
        failed = [r for r in range(self._ranks.count) if self._store.get(str(r)) != b"written"]
        if failed:
            raise AutoparError(f"Rank {failed[0]} could not write its file, so there is no checkpoint.")


def _problem_of(work: Callable[[], object]) -> str:
    """The error of `work` as text, for all ranks to raise together; "" if it succeeds."""
    try:
        work()
    except AutoparError as error:
        return str(error)
    except Exception as error:  # whatever the file system or the store raises
        return f"{type(error).__name__}: {error}"
    return ""


def _store_of_a_save(ranks: AllRanks) -> dist.Store | None:
    """A store that no other save uses; None for a process alone."""
    if ranks.alone:
        return None
    store = _torch.default_store()
    number = store.add("autopar/saves", 1) if ranks.first else 0
    return dist.PrefixStore(f"autopar/saves/{ranks.everyones(number)[0]}", store)
