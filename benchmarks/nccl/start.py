"""How long real ranks take to start training of a tiny model, against DistributedDataParallel, in one run.

OMP_NUM_THREADS=1 python -m benchmarks.nccl.start --ranks 16

Ranks are forks of one process that has imported torch and autopar, and talk over Gloo through one store over TCP. So
only what grows with their number is measured: process groups, the capture and the plan, the handing out of parameters,
comparisons, and the first step. On fewer cores than ranks the clock has the work of all; processor seconds are those of
one rank, on average.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import MLP, mean_square

_TIMEOUT = timedelta(seconds=300)


def join(rank: int, count: int, store: str, port: int) -> None:
    """Joins the process group whose ranks meet at a port."""
    torch.set_num_threads(1)
    address = dist.TCPStore("127.0.0.1", port, count, is_master=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=address, rank=rank, world_size=count, timeout=_TIMEOUT)


def _batch(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 2 * ranks, 8, generator=torch.Generator().manual_seed(0))
    return x, y


def ours(recipe: Any, mesh: dict[str, int]) -> None:
    """Compiles the model, and runs one step."""
    batch = _batch(dist.get_world_size())
    autopar.compile(MLP(), loss_fn=mean_square, mesh=mesh, recipe=recipe).step(*batch)


def ddp() -> None:
    """Wraps the model, and runs one step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = (each.chunk(ranks)[rank] for each in _batch(ranks))
    mean_square(nn.parallel.DistributedDataParallel(MLP())(x), y).backward()


def timed(start: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a start on the clock, and of this rank's processor."""
    dist.barrier()
    begin_seconds, before_seconds = time.perf_counter(), time.process_time()
    start()
    dist.barrier()
    return time.perf_counter() - begin_seconds, time.process_time() - before_seconds


@click.command(help=__doc__)
@click.option("--ranks", default=16, help="Processes.")
@click.option("--rounds", default=3, help="Starts of each contender, in turns; the first of them pays for imports.")
def main(ranks: int, rounds: int) -> None:
    mesh = {"dp": ranks // 2, "tp": 2}
    contenders: dict[str, Callable[[], None]] = {
        "DistributedDataParallel": ddp,
        "autopar, ddp": partial(ours, "ddp", {"dp": ranks}),
        "autopar, zero3": partial(ours, "zero3", {"dp": ranks}),
        "autopar, ddp x tp": partial(ours, {"dp": "ddp", "tp": "tp"}, mesh),
    }
    group = Ranks(ranks, partial(join, port=get_free_port()))
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in contenders}
    for name in list(contenders) * rounds:
        found[name].append(group.run(timed, contenders[name]))
    group.stop()
    table = Table("start", "first, s", "later, s", "processor of a rank, first, s", "later, s", title=f"{ranks} ranks")
    for name, starts in found.items():
        clock = [max(seconds for seconds, _ in each) for each in starts]
        processor = [statistics.mean(seconds for _, seconds in each) for each in starts]
        table.add_row(name, *(f"{x:.2f}" for own in (clock, processor) for x in (own[0], statistics.median(own[1:]))))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
