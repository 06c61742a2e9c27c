"""Plans and seconds of 14 steps of a hand-written mixture of experts under the backend, on two Gloo ranks.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/speed/bench_value_sizes.py [--every-size]

`--every-size` plans for every set of sizes when it comes. The losses are compared with eager ones, in float64.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from autopar.backend import autopar, recurrence
from tests.support.experts import MixtureModel

STEPS = 14


def trained(compile: Callable[[Any], Any]) -> tuple[list[float], list[float]]:
    """Losses and seconds of every step."""
    torch.manual_seed(0)
    model = MixtureModel().double()
    compiled, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.3)
    losses, seconds = [], []
    for _ in range(STEPS):
        x = torch.randn(4, 16, 8, dtype=torch.float64)
        start = time.perf_counter()
        loss = (compiled(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


@click.command()
@click.option("--every-size", is_flag=True, help="Plan for every set of sizes when it comes.")
def main(every_size: bool) -> None:
    """Trains, and prints on the first rank."""
    if every_size:
        recurrence.PLANNED_AT_ONCE = 10**9
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autopar")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    options = {"recipe": "ddp"}
    found, seconds = trained(lambda f: torch.compile(f, backend=autopar, options=options))
    expected, _ = trained(lambda f: f)
    if not dist.is_initialized() or dist.get_rank() == 0:
        plans = sum("planned in" in line for line in told)
        error = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        print(
            f"{plans} plans in {STEPS} steps; {sum(seconds):.1f} s, the last step {seconds[-1]:.2f} s; largest "
            f"difference of a loss from eager {error:.1e}"
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
