"""Ranks on one machine, without torchrun: a function runs in several processes, and its results come back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar import _torch
from autopar.errors import AutoparError, MeshError
from autopar.runtime.failures.failures import show_failure
from autopar.units import counted

_MOST_PER_CORE = 64  # processes; each takes hundreds of megabytes


def launch(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Runs `function(*args)` on ranks of this machine, as torchrun runs a script.

    In a notebook, functions of a cell work too, as long as no cell has used an accelerator. `autopar.compile` inside
    the function finds the ranks by itself, on NCCL with GPUs and on Gloo without.

    Args:
        function: the training function; it returns something that can be pickled.
        args: positional arguments of the function, the same on every rank.
        ranks: number of processes.

    Returns:
        The results of the function, by rank.

    Raises MeshError for a number of ranks below one or above the number of GPUs, and AutoparError with the message of
    the first rank that failed.

    >>> import autopar
    >>> autopar.launch(len, "four", ranks=1)
    [4]
    """
    check_ranks(ranks)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="autopar",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=_start_method(function),
    )
    threads = threads_of_a_rank(ranks)
    try:
        results = elastic_launch(config, _run)(function, args, threads)
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        raise AutoparError(f"Rank {rank} of {ranks} failed: {message_of(failure.message)}") from None
    return [results[rank] for rank in range(ranks)]


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and its failure; a rank that reports the error of another one does not count."""
    own = {rank: each for rank, each in error.failures.items() if not is_repeated(each)}
    found = own or error.failures
    first = min(found, key=lambda rank: found[rank].timestamp)
    return first, found[first]


def is_repeated(failure: ProcessFailure) -> bool:
    """Whether a rank failed by the error that another rank has printed."""
    found: Any = failure.message
    return has_message(failure) and found.get("same_as") is not None


def has_message(failure: ProcessFailure) -> bool:
    """Whether a rank has written an error file, and torchrun has not made up its message."""
    found: Any = failure.message
    return isinstance(found, dict)


def message_of(found: Any) -> str:
    """The text of a rank's error file; a rank that was killed has left none, and torchrun says so in a plain text."""
    return str(found["message"]) if isinstance(found, dict) else str(found)


def check_ranks(ranks: int) -> None:
    """Raises MeshError for a number of ranks that this machine cannot run."""
    if ranks < 1:
        raise MeshError(f"ranks={ranks}: give the number of processes, 1 or more.")
    devices = torch.accelerator.device_count()
    if devices and ranks > devices:
        raise MeshError(
            f"{ranks} ranks were asked for, but this machine has {devices} accelerators; a rank needs one of its "
            f"own. Take ranks={devices}, or hide the accelerators (CUDA_VISIBLE_DEVICES=) to run on CPUs."
        )
    check_processes(ranks)


def check_processes(count: int) -> None:
    """Raises MeshError for more processes than the cores of this machine could ever share, before any is started."""
    cores = len(os.sched_getaffinity(0))
    if count > _MOST_PER_CORE * cores:
        raise MeshError(
            f"{count} processes were asked for, but at most {_MOST_PER_CORE} on each of the {counted(cores, 'core')} "
            f"here can be started. Take at most {_MOST_PER_CORE * cores} ranks."
        )


def threads_of_a_rank(ranks: int) -> int:
    """Number of CPU threads of a process where ranks share the cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _start_method(function: Callable[..., Any]) -> str:
    """The start method of processes: spawn if they can import the function, otherwise fork.

    Raises AutoparError where a copy would hold a context of an accelerator, which cannot be copied.
    """
    if _can_be_imported(function):
        return "spawn"
    if _torch.has_used_accelerator():
        raise AutoparError(
            f"{function!r} is not a function of a module's top level, and this process has used the accelerator. "
            "Move the function into a file and import it, or restart the notebook and launch first."
        )
    return "fork"


def _can_be_imported(function: Callable[..., Any]) -> bool:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(module, getattr(function, "__name__", ""), None) is not function:
        return False
    return module.__name__ != "__main__" or hasattr(module, "__file__")


def _run(function: Callable[..., Any], args: tuple[Any, ...], threads: int) -> Any:
    torch.set_num_threads(threads)
    try:
        return function(*args)
    except BaseException as error:
        show_failure(error)
        sys.exit(1)
