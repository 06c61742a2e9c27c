"""What training loops of scripts are made of: small networks, batches, and numbers by which two runs are compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Ready = Callable[[nn.Module], Any]
Loop = Callable[[Ready], list[float]]
STEPS = 3


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(count: int = STEPS, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of 6 numbers with 3 targets a row, from a generator of their own."""
    generator = torch.Generator().manual_seed(7)
    make = [torch.randn(rows, 9, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x[:, :6], x[:, 6:]) for x in make]


def whole(x: Any) -> Tensor:
    """A tensor or DTensor, whole."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def summed(model: Any) -> float:
    """A number that all parameters change: the sum of their cosines."""
    return sum(whole(p).double().cos().sum().item() for p in model.parameters())


def plain_loop(model: Any, optimizer: Any = None, loss_fn: Any = F.mse_loss) -> list[float]:
    """Three steps, then an evaluation."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in batches():
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(loss_fn(model(x), y).item())
    return [*losses, summed(model)]
