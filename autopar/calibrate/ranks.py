"""Processes of this machine that measure together, where torchrun did not start any."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar.calibrate.devices import find_device
from autopar.calibrate.measure import Measurements, Progress, measure
from autopar.calibrate.team import Team
from autopar.errors import AutoparError

PATIENCE_SECONDS = 180.0  # without a sign of life
PEER_SECONDS = 60.0  # that one rank waits for another
_CONTEXT = multiprocessing.get_context("spawn")


def measure_in_processes(
    ranks: int, *, kind: str, quick: bool, formats: tuple[str, ...], progress: Progress
) -> Measurements:
    """Starts the ranks, lets them measure, and ends them, whatever happens.

    Raises AutoparError when one of them fails, dies, or is silent for too long.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            ours, theirs = _CONTEXT.Pipe()
            args = (rank, ranks, store.port, theirs, kind, quick, formats)
            process = _CONTEXT.Process(target=_rank, args=args, daemon=True)
            _start(process)
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _listen(pipes, progress)
    finally:
        for process in processes:
            process.kill()
            process.join(10)
        for pipe in pipes:
            pipe.close()


def _start(process: Any) -> None:
    """Starts a process whose libraries use one thread from the beginning."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _listen(pipes: list[Connection], progress: Progress) -> Measurements:
    """Passes progress on until every rank is done; returns what the first one measured."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(waiting, PATIENCE_SECONDS)
        if not ready:
            silent = ", ".join(str(pipes.index(pipe)) for pipe in waiting)
            raise AutoparError(f"No sign of life from rank {silent} for {PATIENCE_SECONDS:.0f} s.")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            what, value = _receive(pipe, rank)
            if what == "refused":
                raise AutoparError(value)
            if what == "failed":
                raise _failure(rank, value)
            if what == "done":
                found[rank] = value
            elif rank == 0:
                progress(*value)
    return found[0]


def _receive(pipe: Connection, rank: int) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise AutoparError(f"Rank {rank} died while it measured.") from None


def _failure(rank: int, text: str) -> AutoparError:
    """One sentence, with the traceback as its cause."""
    error = AutoparError(f"Rank {rank} failed while it measured: {text.strip().splitlines()[-1]}")
    error.__cause__ = RuntimeError(text)
    return error


def _rank(rank: int, ranks: int, port: int, pipe: Connection, kind: str, quick: bool, formats: tuple[str, ...]) -> None:
    """The life of one process."""
    threading.Thread(target=follow_parent, daemon=True).start()

    def report(label: str, done: int, total: int) -> None:
        pipe.send(("progress", (label, done, total)))

    try:
        torch.set_num_threads(1)
        device = find_device(kind, rank)
        if ranks > 1:
            dist.init_process_group(
                device.backend,
                store=dist.TCPStore("127.0.0.1", port, is_master=False),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=PEER_SECONDS),
            )
        team = Team(device, rank, ranks, local_size=ranks)
        pipe.send(("done", measure(team, quick=quick, formats=formats, progress=report)))
        team.barrier()  # nobody leaves while another one still talks to it
        if ranks > 1:
            dist.destroy_process_group()
    except AutoparError as error:
        pipe.send(("refused", str(error)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def follow_parent() -> None:
    """Ends this process with its parent, even one that was killed, and even inside a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
