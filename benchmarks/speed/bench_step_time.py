"""Step time of recipes on Gloo ranks, against what a user would pick instead, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_step_time.py --ranks 2

Every contender trains the GPT of examples/gpt.py on the same batches. They take turns, a few steps
each, so that a drift of the machine's speed touches all; the ratio is taken turn by turn. Processor time
is that of all ranks together: it does not count what other work on the machine takes, nor waits.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn

Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how long."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    rounds: int
    steps: int

    def model(self) -> GPT:
        return GPT(GPTConfig(self.sequence, self.layers, self.heads, self.width))

    def batch_of(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(256, (self.batch, self.sequence + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def stepper(model: nn.Module, backward: Callable[[], object]) -> Step:
    """A training step: forward and backward by `backward`, then AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(sizes: Sizes, mesh: DeviceMesh, recipe: str) -> Step:
    batch = sizes.batch_of(0)
    model = autopar.compile(sizes.model(), example_inputs=batch, loss_fn=loss_fn, mesh=mesh, recipe=recipe)
    return stepper(model, lambda: model.step(*batch))


def theirs(sizes: Sizes, model: nn.Module, mesh: DeviceMesh, *, splits_batch: bool) -> Step:
    """A step of an ordinary module; where the batch is split, each rank takes its rows."""
    tokens, targets = sizes.batch_of(0)
    if splits_batch:
        rank, count = mesh.get_local_rank(), mesh.size()
        tokens, targets = tokens.chunk(count)[rank], targets.chunk(count)[rank]
    return stepper(model, lambda: loss_fn(model(tokens), targets).backward())


def torch_ddp(sizes: Sizes, mesh: DeviceMesh) -> Step:
    return theirs(sizes, nn.parallel.DistributedDataParallel(sizes.model()), mesh, splits_batch=True)


def torch_fsdp2(sizes: Sizes, mesh: DeviceMesh) -> Step:
    model = sizes.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return theirs(sizes, model, mesh, splits_batch=True)


def torch_tensor_parallel(sizes: Sizes, mesh: DeviceMesh) -> Step:
    model = sizes.model()
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.output", "mlp.down")}  # type: ignore[dict-item]
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
        block.attention.heads = sizes.heads // mesh.size()
    return theirs(sizes, model, mesh, splits_batch=False)


def torch_sequence_parallel(sizes: Sizes, mesh: DeviceMesh) -> Step:
    model, whole, cut = sizes.model(), Replicate(), Shard(1)
    join = PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole, use_local_output=True)
    split = PrepareModuleInput(input_layouts=whole, desired_input_layouts=cut, use_local_output=True)
    for block in model.blocks:
        columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
        plan: dict[str, object] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel(output_layouts=cut) for name in ("attention.output", "mlp.down")}
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": join, "mlp": join}
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
        block.attention.heads = sizes.heads // mesh.size()
    parallelize_module(model, mesh, {"blocks": split, "norm": join})
    return theirs(sizes, model, mesh, splits_batch=False)


PAIRS: dict[str, tuple[str, Callable[[Sizes, DeviceMesh], Step]]] = {
    "ddp": ("DistributedDataParallel", torch_ddp),
    "zero3": ("FSDP2 (fully_shard)", torch_fsdp2),
    "tp": ("parallelize_module", torch_tensor_parallel),
    "tp+sp": ("parallelize_module, SequenceParallel", torch_sequence_parallel),
}


COLUMNS = ("step ms", "theirs ms", "ratio (range of turns)", "processor ms", "theirs ms", "ratio (range of turns)")


class Turn(NamedTuple):
    """What a step takes: on the clock, and of the processors of all ranks."""

    step_seconds: float
    processor_seconds: float


Turns = tuple[list[Turn], list[Turn]]


def turn(step: Step, count: int) -> Turn:
    """A step of one turn, all ranks starting and ending together."""
    dist.barrier()
    start_seconds, before_seconds = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    dist.barrier()
    step_seconds = (time.perf_counter() - start_seconds) / count
    processor_seconds = (time.process_time() - before_seconds) / count
    return Turn(step_seconds, on_all(processor_seconds))


def on_all(seconds: float) -> float:
    """The sum over ranks."""
    total = torch.tensor(seconds)
    dist.all_reduce(total)
    return total.item()


def take_turns(contenders: tuple[Step, Step], sizes: Sizes) -> Turns:
    """The turns of ours and of theirs; who begins changes from round to round."""
    for step in contenders:
        turn(step, 2)  # warm up
    turns: Turns = ([], [])
    for number in range(sizes.rounds):
        pairs = list(zip(contenders, turns, strict=True))
        for step, kept in pairs if number % 2 else pairs[::-1]:
            kept.append(turn(step, sizes.steps))
    return turns


def cells(turns: Turns) -> list[str]:
    """What `COLUMNS` names: medians, and the median of the ratios of turns with their range."""
    found: list[str] = []
    for mine, other in zip(*(zip(*each, strict=True) for each in turns), strict=True):
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        found += [f"{statistics.median(x) * 1e3:.1f}" for x in (mine, other)]
        found.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return found


def work(rank: int, ranks: int, port: int, sizes: Sizes, recipes: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    title = f"Step time on {ranks} Gloo ranks, median of {sizes.rounds} turns"
    table = Table("recipe", "against", *COLUMNS, title=title)
    for recipe in recipes:
        against, other = PAIRS[recipe]
        turns = take_turns((ours(sizes, mesh, recipe), other(sizes, mesh)), sizes)
        table.add_row(recipe, against, *cells(turns))
    if rank == 0:
        Console(width=150).print(table)
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=2, help="Processes.")
@click.option("--recipes", default="ddp,zero3,tp", help="Which to compare, separated by commas.")
@click.option("--layers", default=4)
@click.option("--width", default=256)
@click.option("--heads", default=4)
@click.option("--sequence", default=128)
@click.option("--batch", default=16, help="Sequences of the global batch.")
@click.option("--rounds", default=15, help="Turns of each contender.")
@click.option("--steps", default=4, help="Steps of a turn.")
def main(ranks: int, recipes: str, **sizes: int) -> None:
    """Print step times and ratios."""
    mp.spawn(work, (ranks, get_free_port(), Sizes(**sizes), recipes.split(",")), ranks)


if __name__ == "__main__":
    main()
