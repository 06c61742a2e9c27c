"""The training of the soak: a small model in float64, a step twice a second, another plan in every life.

`python -m benchmarks.soak.run` starts it on all ranks by `autopar run`, and kills ranks. A life is what all ranks do
from one start to the next death. Every rank leaves a file of samples of its memory for each life.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from autopar.runtime.checkpoint.checkpoint import Checkpoints
from benchmarks.faults.training import PLANS, compiled
from benchmarks.soak.samples import Sample

ROWS, WIDTH = 8, 192
SAMPLE_STEPS = 20  # steps from one sample of the memory to the next
TIMEOUT_SECONDS = 60.0  # that a rank waits for another between steps


class Taught:
    """A loader of random inputs, with what a fixed teacher makes of them and noise; it can go on at any batch."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._teacher = self._drawn(WIDTH, WIDTH) / WIDTH**0.5

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: inputs and targets, each of shape `(ROWS, WIDTH)`."""
        x = self._drawn(ROWS, WIDTH)
        return x, torch.tanh(x @ self._teacher) + 0.1 * self._drawn(ROWS, WIDTH)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self._generator.set_state(state["generator"])

    def _drawn(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, dtype=torch.float64)


def model() -> nn.Module:
    """The model, the same at every start."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an eps that rounding does not pass."""
    return torch.optim.AdamW(module.parameters(), lr=5e-4, eps=1e-6)


def undisturbed(steps: int) -> list[float]:
    """The loss of every step in one process, without autopar."""
    module, loader = model(), Taught()
    optimizer, losses = optimizer_of(module), []
    for _ in range(steps):
        x, y = loader.next()
        loss = mse_loss(module(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sampled(step: int) -> Sample:
    """What this process holds now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {key: int(status[key].split()[0]) for key in ("VmRSS", "RssAnon")}
    return Sample(
        seconds=time.time(),
        step=step,
        resident_bytes=1024 * kilobytes["VmRSS"],
        private_bytes=1024 * kilobytes["RssAnon"],
        tensors=sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
        files=len(os.listdir("/proc/self/fd")),
        threads=int(status["Threads"]),
    )


class Records:
    """What a rank writes of one life: its process, samples of its memory, and on the first rank losses.

    Args:
        folder: folder of the soak.
    """

    def __init__(self, folder: Path) -> None:
        self._rank, self._folder = dist.get_rank(), folder
        lives = [len(list(folder.glob("rank-0.*")))]
        dist.broadcast_object_list(lives)  # before any rank writes its file
        self.life = lives[0]
        self._samples = folder / f"rank-{self._rank}.life-{self.life:03d}.jsonl"
        self._samples.write_text(json.dumps({"pid": os.getpid(), "plan": self.plan}) + "\n")

    @property
    def plan(self) -> str:
        """The plan of this life: each in turn."""
        return PLANS[self.life % len(PLANS)]

    def sample(self, step: int) -> None:
        """Writes what this process holds."""
        with self._samples.open("a") as file:
            file.write(json.dumps(asdict(sampled(step))) + "\n")

    def loss(self, step: int, loss: Tensor) -> None:
        """Writes the loss of a step."""
        if self._rank == 0:
            with (self._folder / "losses").open("a") as file:
                file.write(f"{self.life} {step} {loss.item():.17g}\n")


def train(folder: Path, until_seconds: float, step_seconds: float, save_steps: int) -> None:
    """Trains from the last checkpoint on, and ends by the first checkpoint after a time."""
    records, loader = Records(folder), Taught()
    made = compiled(records.plan, dist.get_world_size(), model(), loader.next())
    optimizer, loader = optimizer_of(made), Taught()
    with Checkpoints(folder / "checkpoints", timeout_seconds=TIMEOUT_SECONDS) as checkpoints:
        first = checkpoints.load_last(made, optimizer, loader=loader).step
        begin_seconds = time.monotonic()
        for step in count(first + 1):
            loss = made.step(*loader.next())
            records.loss(step, loss)
            optimizer.step()
            optimizer.zero_grad()
            if (step - first) % SAMPLE_STEPS == 1:
                records.sample(step)
            if step % save_steps == 0:
                checkpoints.save(step, made, optimizer, loader=loader)
                if _is_over(until_seconds):
                    return
            _wait_until(begin_seconds + (step - first) * step_seconds)


def _is_over(until_seconds: float) -> bool:
    """Whether the time is over on the first rank, so that all ranks end alike."""
    over = [time.time() > until_seconds]
    dist.broadcast_object_list(over)
    return over[0]


def _wait_until(seconds: float) -> None:
    time.sleep(max(0.0, seconds - time.monotonic()))


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--until", "until_seconds", type=float, required=True, help="Seconds since 1970.")
@click.option("--step-seconds", type=float, required=True)
@click.option("--save-steps", type=int, required=True)
def main(folder: Path, until_seconds: float, step_seconds: float, save_steps: int) -> None:
    """One rank of one life."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    train(folder, until_seconds, step_seconds, save_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
