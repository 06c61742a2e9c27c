"""How the ranks of a part join: each with its own device, or several that share one."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.calibrate.devices import device_count
from benchmarks.accelerator import staged
from benchmarks.accelerator.parts import Context
from tests.runtime.gloo_ranks import GLOO_SECONDS, Join


def shares_device(context: Context, ranks: int) -> bool:
    """Whether so many ranks share one device."""
    return not context.on_accelerator or device_count(context.device.type) < ranks


def staged_or_devices(context: Context, ranks: int) -> Join:
    """The way for every part: over the backend of the device, or over Gloo where ranks share one device."""
    return join_staged if shares_device(context, ranks) else join_devices


def join_staged(rank: int, count: int, store: str) -> None:
    """Joins ranks that share one device, over Gloo."""
    staged.register()
    _join(staged.NAME, rank, count, store)


def join_devices(rank: int, count: int, store: str) -> None:
    """Joins ranks that have a device each."""
    torch.accelerator.set_device_index(rank)
    _join(_backends(), rank, count, store)


def join_as_hosts(rank: int, count: int, store: str) -> None:
    """Joins ranks that share one GPU over NCCL.

    NCCL refuses two ranks on one device of one host. Here each rank tells it of a host of its own, so that messages go
    over sockets, through NCCL's kernels, streams and watchdog.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # as ranks that autopar joins
    _join(_backends(), rank, count, store)


def _backends() -> str:
    kind = _torch.accelerator_kind()
    assert kind is not None, "the caller has an accelerator"
    return _torch.backends_of(torch.device(kind))


def _join(backend: str, rank: int, count: int, store: str) -> None:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=GLOO_SECONDS),
    )
