"""Schedules that update without a flush, on real Gloo ranks: their exactness and their losses.

OMP_NUM_THREADS=1 python -m benchmarks.versions.run exact     against plain PyTorch with the same delays
OMP_NUM_THREADS=1 python -m benchmarks.versions.run curves    losses of a small GPT, for the picture
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.export import run_with_loss
from autopar.ir import VERSIONED
from benchmarks.delayed import OPTIMIZERS, optimizer_of, random_batches, record_losses, relative_error, training_text
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import Ranks
from tests.support.delayed import train_stages

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, loss_fn
from text import batches

LOSSES = Path(__file__).with_name("losses.json")
CURVES = ("1f1b", *VERSIONED)
STAGES, UPDATES, POINT_UPDATES, UPDATE_ROWS, LR = 4, 640, 32, 32, 2e-3
Batch = tuple[Tensor, ...]


# --- exactness


def small_model() -> GPT:
    """A GPT of four layers in float64."""
    return GPT(GPTConfig(seq_len=16, layers=4, heads=4, width=32)).double()


def on_ranks(schedule: str, optimizer: str) -> tuple[dict[str, Tensor], list[float], int]:
    """This rank's parameters after the last step, the losses, and the stage that it has."""
    stages = dist.get_world_size()
    given = random_batches(4 * stages)
    model = autopar.compile(
        small_model(), loss_fn=loss_fn, mesh={"pp": stages}, recipe=schedule, micro_batches=4 * stages
    )
    model.attach_optimizer(optimizer_of(optimizer, model))
    losses = [model.step(*batch).item() for batch in given]
    return {name: _whole(p) for name, p in model.named_parameters()}, losses, dist.get_rank()


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


def exact_rows(counts: tuple[int, ...]) -> list[tuple[str, ...]]:
    """A row for each number of ranks, schedule and optimizer."""
    rows: list[tuple[str, ...]] = []
    for count in counts:
        ranks = Ranks(count)
        for schedule, optimizer in itertools.product(VERSIONED, OPTIMIZERS):
            found = ranks.run(on_ranks, schedule, optimizer)
            homes = {name: stage for own, _, stage in found for name in own}
            model, losses = _reference(schedule, optimizer, count, homes)
            expected = dict(model.named_parameters())
            error = max(relative_error(x, expected[n]) for own, _, _ in found for n, x in own.items())
            gap = max(abs(x / y - 1) for _, own, _ in found for x, y in zip(own, losses, strict=True))
            rows.append((str(count), schedule, optimizer, f"{error:.1e}", f"{gap:.1e}"))
        ranks.stop()
    return rows


def _reference(schedule: str, optimizer: str, stages: int, homes: dict[str, int]) -> tuple[nn.Module, list[float]]:
    model = small_model()
    losses = train_stages(
        model,
        random_batches(4 * stages),
        lambda m, part: run_with_loss(m, part, {}, loss_fn),
        optimizer_of(optimizer, model),
        stage_of=homes.__getitem__,
        stages=stages,
        schedule=schedule,
        micro_batches=4 * stages,
    )
    return model, losses


# --- losses


def losses(schedule: str) -> list[float]:
    """The mean loss of the rows of every `POINT_UPDATES` updates, each of `UPDATE_ROWS` rows.

    Under 1F1B a step is an update, in as many micro-batches as stages; under the others it is all updates of a point.
    """
    small = schedule in ("1f1b", "2bw")  # an update is several micro-batches
    parts = STAGES if small else 1
    count = parts if schedule == "1f1b" else parts * POINT_UPDATES
    model = autopar.compile(large_model(), loss_fn=loss_fn, mesh={"pp": STAGES}, recipe=schedule, micro_batches=count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    if schedule != "1f1b":
        model.attach_optimizer(optimizer)
    return [round(_point(model, optimizer, schedule, rows), 4) for rows in rows_of_points()]


def _point(model: Any, optimizer: torch.optim.Optimizer, schedule: str, rows: Batch) -> float:
    if schedule != "1f1b":
        return float(model.step(*rows))
    found = []
    for part in zip(*(x.chunk(POINT_UPDATES) for x in rows), strict=True):
        found.append(float(model.step(*part)))
        optimizer.step()
        optimizer.zero_grad()
    return sum(found) / len(found)


def large_model() -> GPT:
    """The byte-level GPT of four layers whose losses are shown."""
    return GPT(GPTConfig(seq_len=64, layers=4, heads=4, width=64), seed=0)


def rows_of_points() -> Iterator[Batch]:
    """The rows of the updates of every point."""
    text = training_text()
    every = batches(text, batch_size=POINT_UPDATES * UPDATE_ROWS, seq_len=64, seed=0)
    return itertools.islice(every, UPDATES // POINT_UPDATES)


# --- commands


@click.group()
def main() -> None:
    """Measures schedules that update without a flush."""


@main.command()
@click.option("--ranks", default=(2, 4), multiple=True, type=int, help="Numbers of ranks.")
def exact(ranks: tuple[int, ...]) -> None:
    """Prints the table of benchmarks/results/versions.md; exits with 1 where an error is 1e-9 or more."""
    rows = exact_rows(ranks)
    heads = ("ranks", "schedule", "optimizer", "largest relative error of a parameter", "of a loss")
    print("\n".join(markdown_table(heads, rows, text_columns=3)))
    sys.exit(0 if all(float(x) < 1e-9 for row in rows for x in row[3:]) else 1)


@main.command()
def curves() -> None:
    """Trains under every schedule and writes `losses.json`, from which `benchmarks.site.pictures` draws."""
    record_losses(LOSSES, losses, CURVES, ranks=STAGES, steps_of_a_point=POINT_UPDATES)


if __name__ == "__main__":
    main()
