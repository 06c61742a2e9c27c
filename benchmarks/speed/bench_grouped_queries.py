"""Step time of grouped-query attention on four Gloo ranks with two key-value heads: one axis against two.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_grouped_queries.py

Both contenders are a stack of attention blocks under `tp` on four ranks, and take turns in one run. One keeps its axis
(it is given as a DeviceMesh), so that every rank computes all of attention; for the other the axis is taken as
tp=2,tq=2, which splits the key-value heads and the queries of each. A step is forward and backward. The priced seconds
are those that `explain` shows for a machine whose rate of products and link are measured first, on these ranks at once.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar
from autopar.cost_model import Hardware, Link, find_hardware

sys.path.insert(0, str(Path(__file__).parents[2]))

RANKS, KEY_VALUE_HEADS, TIMES = 4, 2, 15


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how long: sizes of the model, turns of each contender, and steps of a turn."""

    layers: int
    heads: int
    head_width: int
    sequence: int
    batch: int
    rounds: int
    steps: int

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_width


class Block(nn.Module):
    """Causal grouped-query attention with a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.head_width
        width, narrow = sizes.width, KEY_VALUE_HEADS * sizes.head_width
        self.norm = nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, narrow, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            z.unflatten(-1, (-1, self.size)).transpose(1, 2) for z in (self.query(y), self.key(y), self.value(y))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def loss_fn(y: Tensor) -> Tensor:
    return y.square().mean()


def seconds_of(run: Callable[[], object], count: int) -> float:
    """Mean seconds of a call on this rank, with all ranks at the start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    dist.barrier()
    return (time.perf_counter() - start) / count


def usual_seconds(run: Callable[[], object]) -> float:
    """Median seconds of a call, all ranks at once."""
    return statistics.median(seconds_of(run, 1) for _ in range(TIMES))


def measured_machine(sizes: Sizes) -> Hardware:
    """The machine with the rate of its products and the link of four ranks, while all of them work."""
    rows = torch.randn(sizes.batch * sizes.sequence, sizes.width)
    weight = torch.randn(sizes.width, sizes.width)
    flops = 2 * rows.shape[0] * sizes.width**2 / usual_seconds(lambda: rows @ weight)
    small, large = torch.ones(1), torch.ones(rows.numel())
    latency = usual_seconds(lambda: dist.all_reduce(small))
    sent = 2 * (RANKS - 1) / RANKS * large.nbytes
    rate = sent / max(1e-9, usual_seconds(lambda: dist.all_reduce(large)) - latency)
    found = torch.tensor([flops, rate, latency], dtype=torch.float64)
    dist.broadcast(found, 0)  # every rank plans for the same machine
    flops, rate, latency = found.tolist()
    link = Link(rate, latency_seconds=latency / (2 * (RANKS - 1)))
    return replace(find_hardware("cpu-gloo"), peak_flops=((4, flops),), inside_node=link)


def work(rank: int, port: int, sizes: Sizes) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    machine = measured_machine(sizes)
    torch.manual_seed(0)
    x = torch.randn(sizes.batch, sizes.sequence, sizes.width)
    one_axis = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))  # is taken as it is
    compiled = []
    for mesh in (one_axis, {"tp": RANKS}):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        compiled.append(
            autopar.compile(
                model, example_inputs=(x,), loss_fn=loss_fn, mesh=mesh, recipe="tp", hardware=machine, recompute="none"
            )
        )

    def step(model: autopar.CompiledModule) -> None:
        model.step(x)
        model.zero_grad()

    seconds: list[list[float]] = [[], []]
    for turn in range(sizes.rounds + 1):
        for kept, model in zip(seconds, compiled, strict=True):
            taken = seconds_of(lambda model=model: step(model), sizes.steps)  # type: ignore[misc]
            if turn:  # the first one warms up
                kept.append(taken)
    if rank == 0:
        print_table(compiled, seconds)
    dist.destroy_process_group()


def print_table(compiled: list[autopar.CompiledModule], seconds: list[list[float]]) -> None:
    """Measured and priced milliseconds of both, and the ratio turn by turn."""
    title = f"{RANKS} Gloo ranks, {KEY_VALUE_HEADS} key-value heads, median of {len(seconds[0])} turns"
    table = Table("mesh", "step ms (range)", "priced ms", title=title)
    for model, taken in zip(compiled, seconds, strict=True):
        spread = f"{statistics.median(taken) * 1e3:.1f} ({min(taken) * 1e3:.1f} to {max(taken) * 1e3:.1f})"
        table.add_row(str(model.plan.mesh), spread, f"{model.explain().step_seconds * 1e3:.1f}")
    ratios = [two / one for one, two in zip(*seconds, strict=True)]
    priced = [model.explain().step_seconds for model in compiled]
    table.add_row(
        "two axes over one",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{priced[1] / priced[0]:.3f} (ratio)",
    )
    Console(width=110).print(table)


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=2, help="Attention blocks.")
@click.option("--heads", default=8, help="Heads of queries.")
@click.option("--head-width", default=64, help="Width of a head.")
@click.option("--sequence", default=512, help="Tokens of a sequence.")
@click.option("--batch", default=2, help="Sequences of a batch.")
@click.option("--rounds", default=9, help="Turns of each contender.")
@click.option("--steps", default=2, help="Steps of a turn.")
def main(**sizes: int) -> None:
    """Print step times, prices and their ratios."""
    mp.spawn(work, (get_free_port(), Sizes(**sizes)), RANKS)


if __name__ == "__main__":
    main()
