"""What training loses by a save: the steps while a checkpoint is written, against those without one.

    OMP_NUM_THREADS=1 python benchmarks/speed/bench_saves.py --width 1536 --rows 64

One process trains an MLP with AdamW and saves it by `Checkpoints`. A save copies to the host, which the call waits for,
and is then written in a thread; each step meanwhile is compared with the median step before. On a busy machine the
processor time of the process during a step says more than the clock: the thread's is in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import click
import torch
from torch import nn

import autopar
from autopar.runtime.checkpoint.checkpoint import Checkpoints


def seconds_of(work: Callable[[], object]) -> float:
    """Duration of a call."""
    start_seconds = time.perf_counter()
    work()
    return time.perf_counter() - start_seconds


def both_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Duration of a call by the clock, and processor time of the process meanwhile."""
    start_seconds = time.process_time()
    seconds = seconds_of(work)
    return seconds, time.process_time() - start_seconds


@click.command(context_settings={"show_default": True})
@click.option("--width", default=1536, help="Width of the four layers.")
@click.option("--rows", default=64, help="Rows of a batch.")
@click.option("--saves", default=7, help="Saves measured, after two that are not.")
@click.option("--folder", help="Where checkpoints are written; a temporary folder by default.")
def main(width: int, rows: int, saves: int, folder: str | None) -> None:
    """Measure the steps beside saves."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    x, y = torch.randn(2, rows, width)
    made = autopar.compile(model, loss_fn=nn.functional.mse_loss, example_inputs=(x, y))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)

    def step() -> None:
        made.step(x, y)
        optimizer.step()
        optimizer.zero_grad()

    rows_of_table = []
    with tempfile.TemporaryDirectory(dir=folder) as place, Checkpoints(place) as checkpoints:
        for number in range(saves + 2):
            before = [both_seconds(step) for _ in range(15)]
            usual, usual_cpu = (statistics.median(column) for column in zip(*before, strict=True))
            call = seconds_of(lambda number=number: checkpoints.save(number + 1, made, optimizer))  # type: ignore[misc]
            start_seconds = time.perf_counter()
            meanwhile, meanwhile_cpu = [], []
            while checkpoints.is_saving:
                seconds, cpu_seconds = both_seconds(step)
                meanwhile.append(seconds)
                meanwhile_cpu.append(cpu_seconds)
            whole = call + time.perf_counter() - start_seconds
            if number >= 2:
                beside = meanwhile or [float("nan")]
                found = (
                    usual,
                    whole / usual,
                    call / usual,
                    beside[0] / usual,
                    statistics.median(beside) / usual,
                    max(beside) / usual,
                    (meanwhile_cpu or beside)[0] / usual_cpu,
                )
                rows_of_table.append(found)
    heads = (
        "a step",
        "a save lasts",
        "the call takes",
        "first step after",
        "median step beside",
        "longest",
        "first, of processor",
    )
    print(f"{sum(p.numel() for p in model.parameters()) * 12 / 1e6:.0f} MB, medians of {saves} saves, in steps:")
    for head, column in zip(heads, zip(*rows_of_table, strict=True), strict=True):
        unit = f"{statistics.median(column) * 1e3:.1f} ms" if head == "a step" else f"{statistics.median(column):.2f}"
        print(f"  {head:20} {unit}   (from {min(column):.3g} to {max(column):.3g})")


if __name__ == "__main__":
    main()
