"""One calibration: on the ranks of torchrun, on processes of its own, or on one rank alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.calibrate.devices import check_device, default_device, device_count, find_device
from autopar.calibrate.measure import Measurements, Progress, check_formats, measure
from autopar.calibrate.ranks import PEER_SECONDS, measure_in_processes
from autopar.calibrate.team import Team
from autopar.errors import AutoparError
from autopar.runtime.ranks.launch import check_processes


def calibrate(
    *,
    device: str | None = None,
    ranks: int | None = None,
    quick: bool = False,
    formats: Sequence[str] = (),
    progress: Progress | None = None,
) -> Measurements:
    """Measures the machine it runs on.

    In a process group, or under torchrun, all its ranks must call it and all get the same result;
    alone, it starts `ranks` processes and ends them.

    Args:
        device: "cpu" or "cuda"; by default cuda where there is one.
        ranks: to measure with, one per GPU or processor by default; of a process group, its size.
        quick: a few sizes and repeats, in seconds instead of minutes.
        formats: number formats of matrix products, by default all that the device has; see `devices.FORMATS`.
        progress: called on the first rank with (what comes, steps done, steps in all).

    Raises AutoparError for what this machine does not have.
    """
    progress = progress or _silence
    kind = default_device() if device is None else device
    check_formats(formats)
    running = _running_ranks()
    count = running or (device_count(kind) if ranks is None else ranks)
    if count < 1:
        raise AutoparError(f"A machine is measured with at least 1 rank, not {count}.")
    if ranks not in (None, count):
        raise AutoparError(f"{count} ranks are running already, so --ranks {ranks} cannot be.")
    check_processes(1 if running else count)
    check_device(kind, int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    names = tuple(formats)
    if running:
        return _in_process_group(kind, quick=quick, formats=names, progress=progress)
    return measure_in_processes(count, kind=kind, quick=quick, formats=names, progress=progress)


def is_first_rank() -> bool:
    """Whether this process is to speak for all."""
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", 0)
    return int(rank) == 0


def _running_ranks() -> int:
    """Ranks of the process group, or of torchrun; 0 for a process alone."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 0


def _in_process_group(kind: str, *, quick: bool, formats: tuple[str, ...], progress: Progress) -> Measurements:
    """Measures as one rank of a running group, which is joined and left where it was not yet."""
    threads, joined = torch.get_num_threads(), dist.is_initialized()
    rank = dist.get_rank() if joined else int(os.environ["RANK"])
    device = find_device(kind, int(os.environ.get("LOCAL_RANK", rank)))
    if not joined:
        dist.init_process_group(device.backend, timeout=timedelta(seconds=PEER_SECONDS))
    try:
        torch.set_num_threads(1)
        team = Team.of_process_group(device)
        quiet = progress if team.rank == 0 else _silence
        return measure(team, quick=quick, formats=formats, progress=quiet)
    finally:
        torch.set_num_threads(threads)
        if not joined:
            dist.destroy_process_group()


def _silence(label: str, done: int, total: int) -> None:
    """Progress of the other ranks."""
