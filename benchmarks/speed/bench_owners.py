"""Step time of two towers on two owners, against the replicated plan and against the slower tower alone, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_owners.py

Two Gloo ranks train a model with two towers of different width. Under the first plan rank 0 runs the narrow tower and
rank 1 the wide one, at the same time; under the second both ranks run both. The third contender is the wide tower in
plain PyTorch on rank 1, while rank 0 waits: owners side by side can do no better. Pairs take turns, a step each.
"""

from __future__ import annotations

import os
import sys
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

import autopar
from autopar.ir import Graph, Mesh, O, ParameterPlan, Plan, R
from autopar.planning.planning import prepare_step

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.bench_step_time import COLUMNS, Sizes, Step, cells, take_turns

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
        Mesh.parse(f"dp={RANKS}"), fingerprint, "towers", 1,
        parameters={name: stored(name) for name in graph.parameters},
        inputs={name: (R,) for name in graph.inputs},
        ops={op.name: (label(op.module),) for op in graph.ops},
    )  # fmt: skip


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def planned(sizes: Sizes, owners: dict[str, int]) -> Step:
    """Forward and backward under a plan."""
    torch.manual_seed(0)
    model, batch = Towers(sizes.width, sizes.layers), data(sizes.batch)
    prepared = prepare_step(model, batch, {}, loss_fn=loss_fn)
    plan = plan_of(prepared.analysis.graph, prepared.captured.fingerprint, owners)
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)

    def step() -> None:
        compiled.step(*batch)
        compiled.zero_grad()

    return step


def alone(sizes: Sizes) -> Step:
    """Forward and backward of the wide tower in plain PyTorch, on the last rank."""
    model, (x, _) = Towers(sizes.width, sizes.layers).wide, data(sizes.batch)

    def step() -> None:
        if dist.get_rank() == RANKS - 1:
            model(x).sum().backward()
            model.zero_grad()

    return step


def work(rank: int, port: int, sizes: Sizes) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    title = f"Towers on two owners, {RANKS} Gloo ranks, median of {sizes.rounds} turns"
    table = Table("against", *COLUMNS, title=title)
    on_owners = planned(sizes, OWNERS)
    for name, other in (("replicated", planned(sizes, {})), ("wide tower alone", alone(sizes))):
        table.add_row(name, *cells(take_turns((on_owners, other), sizes)))
    if rank == 0:
        Console(width=150).print(table)
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--layers", default=4, help="Hidden layers of each tower.")
@click.option(
    "--width", default=1024, help="Width of the narrow tower; the wide one has half more."
)
@click.option("--batch", default=512, help="Rows of the batch.")
@click.option("--rounds", default=15, help="Turns of each contender.")
@click.option("--steps", default=2, help="Steps of a turn.")
def main(**sizes: int) -> None:
    """Print step times and ratios."""
    mp.spawn(work, (get_free_port(), Sizes(heads=1, sequence=1, **sizes)), RANKS)


if __name__ == "__main__":
    main()
