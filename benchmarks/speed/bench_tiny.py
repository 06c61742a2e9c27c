"""Tiny models with everything open on Gloo ranks, against one process, and what planning takes and predicts.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_tiny.py --ranks 1,2,4

The plain model, alone on the first rank while the others wait, and the compiled one on all take turns in one run, each
with AdamW; the ratio is taken turn by turn. Planning is that of `compile`, with an empty cache, and of a second start.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.speed.tiny_models import TINY

STEPS = 3  # of a turn
PREFIXES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


@dataclass(frozen=True)
class Row:
    """One model on some ranks; times in seconds.

    Attributes:
        chosen: the beginning of the start line.
        plain_seconds, step_seconds: medians over turns, of one process and of the compiled model.
        ratio: median over turns of the second over the first.
    """

    name: str
    ranks: int
    parameters: int
    planning_seconds: float
    again_seconds: float
    predicted_seconds: float
    plain_seconds: float
    step_seconds: float
    ratio: float
    chosen: str


class Heard(logging.Handler):
    """Keeps the start lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if ": predicted " in line:
            self.lines.append(line)


def stepper(model: nn.Module, backward: Callable[[], object]) -> Callable[[], None]:
    """A step of training with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of one process."""
    found: Tensor = model(batch[0])
    return F.cross_entropy(found, batch[1]) if len(batch) > 1 else found


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """The seconds of a call, all ranks starting and ending together."""
    dist.barrier()
    start_seconds = time.perf_counter()
    for _ in range(times):
        call()
    dist.barrier()
    return (time.perf_counter() - start_seconds) / times


def measured(name: str, turns: int, heard: Heard) -> Row:
    """The row of one model, the same calls on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, batch = TINY[name]()
    loss_fn = F.cross_entropy if len(batch) > 1 else None
    made: list[Any] = []
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)

    def start() -> None:
        made.append(autopar.compile(copy.deepcopy(plain), loss_fn=loss_fn, example_inputs=batch, cache=folder[0]))

    planning_seconds, again_seconds = seconds_of(start), seconds_of(start)
    model = made[-1]
    ours = stepper(model, lambda: model.step(*batch))
    theirs = stepper(
        plain, lambda: (plain(*batch) if loss_fn is None else loss_fn(plain(batch[0]), batch[1])).backward()
    )
    alone: Callable[[], None] = theirs if rank == 0 else lambda: None
    for step in (ours, alone):
        seconds_of(step, 2)  # warm up
    pairs = [(seconds_of(alone, STEPS), seconds_of(ours, STEPS)) for _ in range(turns)]
    line = heard.lines[-1] if rank == 0 else "predicted 0 s"
    number, prefix = re.search(r"predicted ([\d.]+) (\S+)", line).groups()  # type: ignore[union-attr]
    return Row(
        name,
        ranks,
        sum(each.numel() for each in plain.parameters()),
        planning_seconds,
        again_seconds,
        float(number) * PREFIXES[prefix],
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
        line.removeprefix("autopar: ").partition(": ")[0],
    )


def work(rank: int, ranks: int, port: int, names: list[str], turns: int, results: Path | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    heard = Heard()
    logging.getLogger("autopar").addHandler(heard)
    logging.getLogger("autopar").setLevel("INFO")
    for name in names:
        row = measured(name, turns, heard)
        if rank == 0:
            print(
                f"| {name} | {ranks} | {row.parameters:,} | {row.planning_seconds:.1f} | {row.again_seconds:.2f} | "
                f"{row.plain_seconds * 1e3:.2f} | {row.step_seconds * 1e3:.2f} | {row.ratio:.2f} | "
                f"{row.predicted_seconds * 1e3:.2f} | {row.chosen} |",
                flush=True,
            )
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    dist.destroy_process_group()


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default="1,2,4", help="Numbers of processes, separated by commas.")
@click.option("--only", default="", help="Models, separated by commas; by default all.")
@click.option("--turns", default=9, help="Turns of each model.")
@click.option("--results", type=click.Path(path_type=Path), help="File of rows to add to.")
def main(ranks: str, only: str, turns: int, results: Path | None) -> None:
    """Print a row for each model and number of processes."""
    names = only.split(",") if only else list(TINY)
    for count in (int(text) for text in ranks.split(",")):
        mp.spawn(work, (count, get_free_port(), names, turns, results), count)


if __name__ == "__main__":
    main()
