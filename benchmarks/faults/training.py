"""The training that is killed: a small model in float64, under one of three plans, from its last checkpoint on."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import autopar
from autopar.runtime.checkpoint.checkpoint import Checkpoints
from benchmarks.faults.accidents import Accident, arm

STEPS, EVERY = 12, 2  # steps in all, and from checkpoint to checkpoint
TIMEOUT_SECONDS = 10.0  # that a rank waits for another
PLANS = ("ddp", "zero3", "pp=2 x dp=2")


class Batches:
    """A loader of random batches, which can go on at any of them."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: inputs and targets, each of shape `(8, 12)`."""
        x, y = torch.randn(2, 8, 12, generator=self._generator, dtype=torch.float64)
        return x, y

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self._generator.set_state(state["generator"])


def model() -> nn.Module:
    """The model, the same at every start."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(*layers).double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an eps that rounding does not pass."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)


def undisturbed() -> list[float]:
    """The loss of every step in one process, without autopar."""
    module, loader = model(), Batches()
    optimizer, losses = optimizer_of(module), []
    for _ in range(STEPS):
        x, y = loader.next()
        loss = mse_loss(module(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compiled(plan: str, count: int, module: nn.Module, batch: tuple[Tensor, Tensor]) -> autopar.CompiledModule:
    """A model under a plan for so many ranks; each rank gives whole batches."""
    in_stages = plan.startswith("pp")
    mesh: dict[str, int] = {"dp": count}
    recipe: str | dict[str, str] = plan
    if in_stages:
        mesh, recipe = {"pp": 2, "dp": count // 2}, {"pp": "1f1b", "dp": "ddp"}
    if in_stages and count == 2:
        mesh, recipe = {"pp": 2}, "1f1b"
    return autopar.compile(
        module,
        loss_fn=mse_loss,
        mesh=mesh,
        recipe=recipe,
        example_inputs=batch,
        timeout_seconds=TIMEOUT_SECONDS,
        micro_batches=2 if in_stages else 1,
    )


def train(folder: Path, plan: str, accident: Accident | None) -> None:
    """Trains from the last checkpoint to the end; the first rank writes what happens to `log`."""
    made, loader = compiled(plan, dist.get_world_size(), model(), Batches().next()), Batches()
    optimizer = optimizer_of(made)
    checkpoints = Checkpoints(folder / "checkpoints", timeout_seconds=TIMEOUT_SECONDS)
    armed = arm(accident, dist.get_rank())
    armed.loading()
    first = checkpoints.load_last(made, optimizer, loader=loader).step
    _log(folder, f"resumed {first}")
    for step in range(first + 1, STEPS + 1):
        armed.step(step)
        loss = made.step(*loader.next())
        _log(folder, f"loss {step} {loss.item():.17g}")
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            armed.saving(step)
            checkpoints.save(step, made, optimizer, loader=loader)
            _log(folder, f"saved {step - EVERY}")  # a save waits for the one before
    checkpoints.finish()
    _log(folder, f"saved {STEPS}")


def _log(folder: Path, line: str) -> None:
    if dist.get_rank() == 0:
        with (folder / "log").open("a") as file:
            file.write(f"{line}\n")


def work(rank: int, count: int, folder: str, port: int, plan: str, accident: Accident | None) -> None:
    """One rank of one attempt; its processor time and its error, if it has one, are left in files."""
    torch.set_num_threads(1)
    begin_seconds, code = time.process_time(), 0
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("localhost", port),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    try:
        train(Path(folder), plan, accident)
        dist.destroy_process_group()
    except (autopar.PeerError, autopar.AutoparError) as error:
        code = 3
        Path(folder, f"error{port}.{rank}").write_text(f"{type(error).__name__}: {error}"[:800])
    spent_seconds = time.process_time() - begin_seconds
    Path(folder, f"spent{port}.{rank}").write_text(str(spent_seconds))
    sys.exit(code)
