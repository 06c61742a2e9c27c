"""Step time of pipeline stages on Gloo ranks, against the same stages written by hand, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_pipeline.py --ranks 2

Both train the GPT of examples/gpt.py, cut at the same blocks, by the same schedule of
torch.distributed.pipelining. They take turns, a step each, so that a drift of the machine's speed touches
both; the ratio is taken turn by turn. Processor time is that of all ranks together: it does not count what
other work on the machine takes, nor waits.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import autopar
from autopar.cost_model import find_hardware
from autopar.ir import Pipeline
from autopar.pipeline.parts import block_starts
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request.request import Request

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from gpt import GPT, loss_fn

from benchmarks.speed.bench_step_time import COLUMNS, Sizes, Step, cells, take_turns


@dataclass(frozen=True)
class Row:
    """A schedule, what runs it, and the stages of a rank."""

    name: str
    by_hand: Callable[..., object]
    chunks: int


ROWS = {
    row.name: row
    for row in (
        Row("gpipe", ScheduleGPipe, 1),
        Row("1f1b", Schedule1F1B, 1),
        Row("interleaved", ScheduleInterleaved1F1B, 2),
    )
}


@dataclass(frozen=True)
class Setup:
    """The training that is timed.

    Attributes:
        sizes: sizes of the model and its batch.
        micro_batches: number of micro-batches that a step cuts the batch into.
        optimizer: whether a step ends with AdamW.
    """

    sizes: Sizes
    micro_batches: int
    optimizer: bool


class Part(nn.Module):
    """A stage as one writes it by hand: the blocks from `begin` to `end`, and what is at the ends."""

    def __init__(self, model: GPT, begin: int, end: int) -> None:
        super().__init__()
        self.blocks = model.blocks[begin:end]
        self.is_first, self.is_last = begin == 0, end == len(model.blocks)
        if self.is_first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.token_embedding(x) + self.position_embedding(positions)
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.is_last else x


def optimized(parameters: list[nn.Parameter], run: Callable[[], object], setup: Setup) -> Step:
    """A training step: what `run` does, then AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        run()
        if setup.optimizer:
            optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(setup: Setup, row: Row) -> Step:
    sizes = setup.sizes
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, count = sizes.model(), ranks * row.chunks
    layers = sizes.layers // count
    stages = [
        PipelineStage(Part(model, i * layers, (i + 1) * layers), i, count, torch.device("cpu"))
        for i in range(rank, count, ranks)
    ]
    schedule = row.by_hand(stages if row.chunks > 1 else stages[0], setup.micro_batches, loss_fn=loss_fn)
    tokens, targets = sizes.batch_of(0)
    inputs = (tokens,) if rank == 0 else ()
    labels = {"target": targets} if rank == ranks - 1 else {}
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    run = functools.partial(schedule.step, *inputs, **labels, return_outputs=False)  # type: ignore[attr-defined]
    return optimized(parameters, run, setup)


def ours(setup: Setup, row: Row) -> Step:
    sizes, micro_batches = setup.sizes, setup.micro_batches
    ranks, model, batch = dist.get_world_size(), sizes.model(), sizes.batch_of(0)
    count = ranks * row.chunks
    prepared = prepare_step(model, tuple(x[: len(x) // micro_batches] for x in batch), loss_fn=loss_fn)
    plan = make_plan(prepared, Request(find_hardware("cpu-gloo"), mesh={"dp": 1}, micro_batches=micro_batches))
    starts = block_starts(prepared.analysis.graph)  # the embedding, the layers, the head
    cuts = tuple(starts[1 + i * (sizes.layers // count)] for i in range(1, count))
    plan = replace(plan, pipeline=Pipeline(ranks, row.name, cuts))
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan, example_inputs=batch)
    return optimized(list(compiled.parameters()), lambda: compiled.step(*batch), setup)


def work(rank: int, ranks: int, port: int, setup: Setup, rows: list[Row]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    title = f"{ranks} Gloo ranks, median of {setup.sizes.rounds} turns"
    table = Table("schedule", "stages", *COLUMNS, title=title)
    for row in rows:
        turns = take_turns((ours(setup, row), by_hand(setup, row)), setup.sizes)
        table.add_row(row.name, str(ranks * row.chunks), *cells(turns))
    if rank == 0:
        Console(width=150).print(table)
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=2, help="Processes, each a rank of the pipeline.")
@click.option("--schedules", default=",".join(ROWS), help="Which to compare, separated by commas.")
@click.option("--micro-batches", default=8)
@click.option("--optimizer/--no-optimizer", default=True, help="Whether a step ends with AdamW.")
@click.option("--layers", default=8)
@click.option("--width", default=256)
@click.option("--heads", default=4)
@click.option("--sequence", default=128)
@click.option("--batch", default=16, help="Sequences of the global batch.")
@click.option("--rounds", default=11, help="Turns of each contender.")
@click.option("--steps", default=1, help="Steps of a turn.")
def main(ranks: int, schedules: str, micro_batches: int, optimizer: bool, **sizes: int) -> None:
    """Print step times and ratios."""
    rows = [ROWS[name] for name in schedules.split(",")]
    setup = Setup(Sizes(**sizes), micro_batches, optimizer)
    mp.spawn(work, (ranks, get_free_port(), setup, rows), ranks)


if __name__ == "__main__":
    main()
