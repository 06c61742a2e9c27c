"""A model that is trained and saved on one process, for tests of what its checkpoint holds and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint
from tests.runtime.models import mean_square

X, Y = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(width: int = 16, bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    first = nn.Linear(8, width, bias=bias)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, 8)).double()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loads(path: Path) -> int:
    """The step of a checkpoint that loads."""
    model = make()
    return load_checkpoint(path, model, adamw(model))["step"]


def refusal(path: Path, optimizer_of: Callable[[nn.Module], Optimizer]) -> str:
    """The error of a load, which leaves the model as it was."""
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(autopar.AutoparError) as caught:
        load_checkpoint(path, model, optimizer_of(model))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    return str(caught.value)
