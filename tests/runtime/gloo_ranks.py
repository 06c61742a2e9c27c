"""Real ranks for tests: processes that talk over Gloo, and are never left behind or waited for forever."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.calibrate.ranks import follow_parent

# A rank that compiles does so itself, rather than start processes for it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Forks of one server that has imported what ranks import and has captured one model: a process started anew spends
# seconds on that. They hash alike, and unlike the process that tests them.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.runtime.warm"])
TIMEOUT_SECONDS = 120  # of a task on all ranks
GLOO_SECONDS = 60  # that a rank waits for another
STACK_SECONDS = 2  # that a rank which hangs takes to write where it is
# After so many tasks ranks start anew. Groups of earlier tasks cannot be ended, because DTensor's caches hold them, and
# each has three threads in every rank, of which one wakes a hundred times a second.
TASKS_OF_A_START = 16

Join = Callable[[int, int, str], None]  # rank, number of ranks, file where they meet


def kept_ranks(count: int) -> Iterator[Ranks]:
    """Ranks for a fixture of a session, which end with it."""
    ranks = Ranks(count)
    yield ranks
    ranks.stop()


class RankFailed(AssertionError):
    """A task raised on some rank; the message has the traceback."""


class Ranks:
    """`count` processes in one process group, started at the first task.

    Args:
        count: number of ranks.
        joined: function of a module's top level by which a rank joins the process group; by default `join`.
        context: how processes start, a context of multiprocessing.
    """

    def __init__(self, count: int, joined: Join | None = None, context: Any = CONTEXT) -> None:
        self.count, self._joined, self._context = count, joined or join, context
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tasks = 0

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `task(*args)` on every rank; returns the results by rank.

        Tasks are functions of a module's top level. A task that fails or takes too long ends all ranks;
        the next one starts new ones.
        """
        if self._tasks == TASKS_OF_A_START:
            self.stop()
        if not self._processes:
            self._start()
        self._tasks += 1
        for pipe in self._pipes:
            pipe.send((os.environ.get("PYTEST_CURRENT_TEST", ""), task, args))
        try:
            return self._results()
        except BaseException:
            self.stop()
            raise

    def _results(self) -> list[Any]:
        results: dict[int, Any] = {}
        rank_of = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        while len(results) < self.count:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=TIMEOUT_SECONDS)
            if not ready:
                hanging = sorted(set(range(self.count)) - set(results))
                raise RankFailed(f"ranks {hanging} hang\n{self._stacks(hanging)}")
            for pipe in ready:
                rank = rank_of[id(pipe)]
                ok, value = self._received(rank)
                if not ok:
                    raise RankFailed(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.count)]

    def _received(self, rank: int) -> tuple[bool, Any]:
        """What a rank sent; of one that ended instead, how it ended."""
        try:
            return self._pipes[rank].recv()
        except EOFError:
            assert self._folder is not None, "the ranks were started"
            self._processes[rank].join(10)
            stack = _stack_file(self._folder.name, rank).read_text()
            return False, f"ended with exit code {self._processes[rank].exitcode}, and sent nothing\n{stack}"

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Where every thread of these ranks is."""
        assert self._folder is not None, "the ranks were started"
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        files = {rank: _stack_file(self._folder.name, rank) for rank in ranks}
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items())

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.count, store, theirs, self._joined), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._tasks = [], [], 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"


def _serve(rank: int, count: int, store: str, pipe: Connection, joined: Join) -> None:
    # The handlers are in C, so that a rank that hangs while it holds the interpreter's lock answers too, and one that
    # the C library aborts says where it was.
    stacks = _stack_file(str(Path(store).parent), rank).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    faulthandler.enable(stacks)
    threading.Thread(target=follow_parent, daemon=True).start()
    # What is imported stays: tests that look for garbage look through their own alone.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.WARNING)  # else each plan is announced
    has_joined = False
    while True:
        try:
            # Processes that a rank starts, and probes in it, can tell which test asked.
            os.environ["PYTEST_CURRENT_TEST"], task, args = pipe.recv()
        except EOFError:
            return
        try:
            if not has_joined:
                joined(rank, count, store)
                has_joined = True
            torch.manual_seed(0)
            torch.compiler.set_stance("default")  # whatever the task before has set
            pipe.send((True, task(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def join(rank: int, count: int, store: str) -> None:
    """Joins the process group whose ranks meet at the file `store`."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timedelta(seconds=GLOO_SECONDS)
    )


def equal_on_all(results: Sequence[Any]) -> Any:
    """The one result that all ranks returned."""
    assert all(result == results[0] for result in results), results
    return results[0]
