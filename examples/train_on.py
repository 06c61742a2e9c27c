"""Trains a byte-level GPT, and goes on from its last checkpoint whenever it is started again.

    autopar run examples/train_on.py --ranks 4 --min-ranks 2 --steps 200

Kill a rank while it trains (`kill -9 PID`): all ranks start again from the last checkpoint. The losses of every step
are in `--out`/losses.txt, as an undisturbed run has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import torch
from gpt import GPT, GPTConfig, loss_fn
from text import read_source, standard_library
from torch import Tensor

import autopar


class Passages:
    """A loader of passages drawn at random, which can go on at any batch.

    Its position is the state of its generator, as `state_dict` has it.
    """

    def __init__(self, text: bytes, *, batch_size: int, seq_len: int, seed: int) -> None:
        self._data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)
        self._batch_size, self._offsets = batch_size, torch.arange(seq_len + 1)

    def __iter__(self) -> Passages:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        last = len(self._data) - len(self._offsets) + 1
        starts = torch.randint(last, (self._batch_size, 1), generator=self._generator)
        passages = self._data[starts + self._offsets].long()
        return passages[:, :-1], passages[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=200, help="Training steps in all.")
@click.option("--every", default=20, help="Steps from checkpoint to checkpoint.")
@click.option("--recipe", default="auto", metavar="R", help="Such as zero3.")
@click.option("--seed", default=0, help="Of the initial weights and of the batches.")
@click.option("--out", default="runs/train_on", type=click.Path(path_type=Path), help="For results.")
def main(steps: int, every: int, recipe: str, seed: int, out: Path) -> None:
    """Train on every rank, from the last checkpoint on."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    text = read_source(standard_library(), limit_bytes=1_000_000)
    loader = Passages(text, batch_size=16, seq_len=32, seed=seed)
    example = next(Passages(text, batch_size=16, seq_len=32, seed=seed))
    model = autopar.compile(
        GPT(GPTConfig(seq_len=32, layers=2, heads=4, width=64), seed=seed),
        example_inputs=example,
        loss_fn=loss_fn,
        recipe=recipe,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with autopar.checkpoint.Checkpoints(out / "checkpoints", keep=2) as checkpoints:
        first = checkpoints.load_last(model, optimizer, loader=loader).step
        for step in range(first + 1, steps + 1):
            loss = model.step(*next(loader))
            optimizer.step()
            optimizer.zero_grad()
            write_loss(out, step, loss)
            if step % every == 0 or step == steps:
                checkpoints.save(step, model, optimizer, loader=loader)


def write_loss(out: Path, step: int, loss: Tensor) -> None:
    """The first rank adds a line `step loss`; a repeated step has a further line."""
    if os.environ.get("RANK", "0") == "0":
        with (out / "losses.txt").open("a") as file:
            file.write(f"{step} {loss.item():.17g}\n")


if __name__ == "__main__":
    main()
