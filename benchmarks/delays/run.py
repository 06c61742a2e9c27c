"""Losses of one GPT under everything that delays gradients, on four Gloo ranks, for one picture.

OMP_NUM_THREADS=1 python -m benchmarks.delays.run

Schedules cut the model into four stages; the other recipes have four replicas of it. Model, batches and optimizer are
the same, and an update of 1F1B, or a step of all replicas, sees 32 passages.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
import torch.distributed as dist

import autopar
from benchmarks.delayed import record_losses
from benchmarks.versions.run import CURVES as SCHEDULES
from benchmarks.versions.run import LR, POINT_UPDATES, STAGES, large_model, loss_fn, rows_of_points
from benchmarks.versions.run import losses as losses_in_stages

LOSSES = Path(__file__).with_name("losses.json")
REPLICAS = ("diloco:4", "local:4", "geo:4", "async-server:0", "async-server:2")


def losses(name: str) -> list[float]:
    """The mean loss of the rows of every `POINT_UPDATES` updates, under a schedule or by replicas."""
    return losses_in_stages(name) if name in SCHEDULES else _losses_of_replicas(name)


def _losses_of_replicas(recipe: str) -> list[float]:
    model = autopar.compile(large_model(), loss_fn=loss_fn, mesh={"dp": dist.get_world_size()}, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    for rows in rows_of_points():
        for part in zip(*(x.chunk(POINT_UPDATES) for x in rows), strict=True):
            found.append(model.step(*part).item())
            optimizer.step()
            optimizer.zero_grad()
    model.meet()
    mean = torch.tensor(found, dtype=torch.float64).view(-1, POINT_UPDATES).mean(1)
    dist.all_reduce(mean)
    return [round(x / dist.get_world_size(), 4) for x in mean.tolist()]


@click.command()
def main() -> None:
    """Trains under every schedule and recipe and writes `losses.json`, from which the picture is drawn."""
    record_losses(LOSSES, losses, (*SCHEDULES, *REPLICAS), ranks=STAGES, steps_of_a_point=POINT_UPDATES)


if __name__ == "__main__":
    main()
