"""A loop written for accelerate, on two ranks: a small model with random weights, no network.

    torchrun --standalone --nproc-per-node 2 examples/frameworks/accelerate_loop.py

The first line of `main` is the only one that a plan changes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations import AutoparAccelerator


def main() -> None:
    """Learns which of three sums of inputs is the largest, and prints how often it is right."""
    accelerator = AutoparAccelerator(recipe="zero3")
    torch.manual_seed(0)
    inputs = torch.randn(512, 12)
    data = TensorDataset(inputs, inputs.view(512, 3, 4).sum(-1).argmax(-1))
    model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.GELU(), torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    right = []
    with torch.no_grad():
        for x, y in loader:
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right.append(guesses == labels)
    accelerator.print(f"right: {torch.cat(right).double().mean():.2f}")


if __name__ == "__main__":
    main()
