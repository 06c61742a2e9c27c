"""Step time of two towers on two owners, against the replicated plan and against the slower tower alone, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_owners.py

Two Gloo ranks train a model with two towers of different width. Under the first plan rank 0 runs the narrow tower and
rank 1 the wide one, at the same time; under the second both ranks run both. The third contender is the wide tower in
plain PyTorch on rank 1, while rank 0 waits: owners side by side can do no better. Pairs take turns, a step each.

The price stands beside the measurement: the makespan of the owners' plan and the time of the replicated plan on a
machine with the FLOP/s that the wide tower alone reaches, and Gloo's usual link. It has no optimizer, as the steps have
none.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_model import Hardware, find_hardware
from autopar.ir import Graph, Mesh, O, ParameterPlan, Plan, R
from autopar.pipeline.composed import step_of
from autopar.planning.planning import prepare_step

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.bench_step_time import COLUMNS, Sizes, Step, Turns, cells, take_turns

FEATURES, CLASSES, RANKS = 256, 16, 2
OWNERS = {"narrow": 0, "wide": 1}
loss_fn = nn.functional.cross_entropy


def tower(width: int, layers: int) -> nn.Sequential:
    """Linear layers of this width between a batch's features and as many results."""
    inner = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(FEATURES, width), *inner, nn.Linear(width, FEATURES))


class Towers(nn.Module):
    """A linear head on the results of two towers, of which the second is wider than the first."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.narrow, self.wide = tower(width, layers), tower(width * 3 // 2, layers)
        self.head = nn.Linear(2 * FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.narrow(x), self.wide(x)], 1))


def plan_of(graph: Graph, fingerprint: str, owners: dict[str, int]) -> Plan:
    """A plan whose owners run and store the submodules that `owners` names; all ranks run the rest."""

    def owner(module: str) -> int | None:
        return owners.get(module.partition(".")[0])

    def stored(name: str) -> ParameterPlan:
        rank = owner(name)
        layout = (R if rank is None else O(rank),)
        return ParameterPlan(layout, layout)

    def label(module: str) -> str:
        rank = owner(module)
        return "-" if rank is None else f"@{rank}"

    return Plan(
        Mesh.parse(f"dp={RANKS}"),
        fingerprint,
        "towers",
        1,
        parameters={name: stored(name) for name in graph.parameters},
        inputs={name: (R,) for name in graph.inputs},
        ops={op.name: (label(op.module),) for op in graph.ops},
    )


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def planned(sizes: Sizes, owners: dict[str, int]) -> tuple[Step, Callable[[Hardware], float]]:
    """Forward and backward under a plan, and the seconds at which a machine's figures price them."""
    torch.manual_seed(0)
    model, batch = Towers(sizes.width, sizes.layers), data(sizes.batch)
    prepared = prepare_step(model, batch, {}, loss_fn=loss_fn)
    graph = prepared.analysis.graph
    plan = plan_of(graph, prepared.captured.fingerprint, owners)
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)

    def step() -> None:
        compiled.step(*batch)
        compiled.zero_grad()

    def priced(hardware: Hardware) -> float:
        terms = step_of(graph, plan, hardware).time()
        return sum(float(term.value) for term in terms if term.name != "optimizer")

    return step, priced


def alone(sizes: Sizes) -> tuple[Step, int]:
    """Forward and backward of the wide tower in plain PyTorch, on the last rank, and their FLOPs."""
    model, (x, _) = Towers(sizes.width, sizes.layers).wide, data(sizes.batch)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()

    def step() -> None:
        if dist.get_rank() == RANKS - 1:
            model(x).sum().backward()
            model.zero_grad()

    return step, counter.get_total_flops()


def machine(flops_per_second: float) -> Hardware:
    """A processor whose products have this rate, element-wise ops included, and Gloo's usual link."""
    return replace(
        find_hardware("cpu-gloo"),
        peak_flops=((4, flops_per_second),),
        matmul_efficiency=1.0,
        matmul_half_size=0.0,
        memory_bytes_per_second=math.inf,
        launch_seconds=0.0,
        host_seconds=0.0,
    )


def median_seconds(turns: Turns) -> list[float]:
    """Median seconds of a step of both contenders."""
    return [statistics.median(turn.step_seconds for turn in each) for each in turns]


def work(rank: int, port: int, sizes: Sizes) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    title = f"Towers on two owners, {RANKS} Gloo ranks, median of {sizes.rounds} turns"
    table = Table("against", *COLUMNS, title=title)
    (on_owners, price), (replicated, other_price) = (planned(sizes, owners) for owners in (OWNERS, {}))
    wide, flops = alone(sizes)
    against_replicated = take_turns((on_owners, replicated), sizes)
    against_wide = take_turns((on_owners, wide), sizes)
    table.add_row("replicated", *cells(against_replicated))
    table.add_row("wide tower alone", *cells(against_wide))
    rate = flops / median_seconds(against_wide)[1]
    measured = median_seconds(against_replicated)
    prices = Table("plan", "step ms", "priced ms", "priced / measured", title=f"at {rate / 1e9:.1f} GFLOP/s")
    for name, seconds, of in zip(("owners", "replicated"), measured, (price, other_price), strict=True):
        priced = of(machine(rate))
        prices.add_row(name, f"{seconds * 1e3:.1f}", f"{priced * 1e3:.1f}", f"{priced / seconds:.3f}")
    if rank == 0:
        Console(width=150).print(table, prices)
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=4, help="Hidden layers of each tower.")
@click.option("--width", default=1024, help="Width of the narrow tower; the wide one has half more.")
@click.option("--batch", default=512, help="Rows of the batch.")
@click.option("--rounds", default=15, help="Turns of each contender.")
@click.option("--steps", default=2, help="Steps of a turn.")
def main(**sizes: int) -> None:
    """Print step times and ratios."""
    mp.spawn(work, (get_free_port(), Sizes(heads=1, sequence=1, **sizes)), RANKS)


if __name__ == "__main__":
    main()
