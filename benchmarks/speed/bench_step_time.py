"""Step time of recipes on Gloo ranks, against what a user would pick instead, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_step_time.py --ranks 2

Every contender trains the GPT of examples/gpt.py on the same batches. They take turns, a few steps
each, so that a drift of the machine's speed touches all; the ratio is taken turn by turn.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    model = autopar.compile(
        sizes.model(), example_inputs=batch, loss_fn=loss_fn, mesh=mesh, recipe=recipe
    )
    return stepper(model, lambda: model.step(*batch))


def theirs(sizes: Sizes, model: nn.Module, mesh: DeviceMesh, *, splits_batch: bool) -> Step:
    """A step of an ordinary module; where the batch is split, each rank takes its rows."""
    tokens, targets = sizes.batch_of(0)
    if splits_batch:
        rank, count = mesh.get_local_rank(), mesh.size()
        tokens, targets = tokens.chunk(count)[rank], targets.chunk(count)[rank]
    return stepper(model, lambda: loss_fn(model(tokens), targets).backward())


def torch_ddp(sizes: Sizes, mesh: DeviceMesh) -> Step:
    return theirs(
        sizes, nn.parallel.DistributedDataParallel(sizes.model()), mesh, splits_batch=True
    )


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


PAIRS: dict[str, tuple[str, Callable[[Sizes, DeviceMesh], Step]]] = {
    "ddp": ("DistributedDataParallel", torch_ddp),
    "zero3": ("FSDP2 (fully_shard)", torch_fsdp2),
    "tp": ("parallelize_module", torch_tensor_parallel),
}


def turn(step: Step, count: int) -> float:
    """Seconds per step of one turn, all ranks starting and ending together."""
    dist.barrier()
    start_seconds = time.perf_counter()
    for _ in range(count):
        step()
    dist.barrier()
    return (time.perf_counter() - start_seconds) / count


def compare(sizes: Sizes, mesh: DeviceMesh, recipe: str) -> tuple[list[float], list[float]]:
    """Seconds per step, turn by turn, of ours and of theirs."""
    contenders = (ours(sizes, mesh, recipe), PAIRS[recipe][1](sizes, mesh))
    for step in contenders:
        turn(step, 2)  # warm up
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(sizes.rounds):
        for step, kept in zip(contenders, seconds, strict=True):
            kept.append(turn(step, sizes.steps))
    return seconds


def work(rank: int, ranks: int, port: int, sizes: Sizes, recipes: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    table = Table(title=f"Step time on {ranks} Gloo ranks, median of {sizes.rounds} turns")
    for column in ("recipe", "autopar ms", "against", "ms", "ratio (median of turns)"):
        table.add_column(column)
    for recipe in recipes:
        mine, other = compare(sizes, mesh, recipe)
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        milliseconds = [f"{statistics.median(x) * 1e3:.1f}" for x in (mine, other)]
        spread = f"{statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
        table.add_row(recipe, milliseconds[0], PAIRS[recipe][0], milliseconds[1], spread)
    if rank == 0:
        Console(width=110).print(table)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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
    mp.spawn(work, (ranks, free_port(), Sizes(**sizes), recipes.split(",")), ranks)


if __name__ == "__main__":
    main()
