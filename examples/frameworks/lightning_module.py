"""A LightningModule on two ranks: a small network with random weights, no network access.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/lightning_module.py

The argument `strategy` is all that a plan changes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations import AutoparStrategy


class Sums(LightningModule):
    """Learns which of three sums of inputs is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        x, y = batch
        self.log("right", (self.network(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Trains for four epochs, and prints how often the module is right."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 12)
    data = TensorDataset(inputs, inputs.view(512, 3, 4).sum(-1).argmax(-1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=AutoparStrategy(recipe="zero3"),
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sums(), DataLoader(data, 32, shuffle=True), DataLoader(data, 32))
    if trainer.is_global_zero:
        print(f"right: {float(trainer.callback_metrics['right']):.2f}")


if __name__ == "__main__":
    main()
