"""What `compile` refuses and names the backend for, the backend runs as it is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

SEEN: list[Tensor] = []


class Base(nn.Module):
    """A linear layer whose subclasses do something else besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.last: Any = None
        self.draws = iter([0.5, 2.0, 3.0] * 9)


class Keeps(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.last = y.detach()
        return y.square().mean()


class Collects(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        SEEN.append(y.detach())
        return y.square().mean()


class Draws(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y if random.random() < 0.5 else 2 * y).square().mean()


class Changes(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x).square().mean()


class Assigns(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        return (self.linear(x) * self.total).square().mean()


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y if y.sum() > 0 else 3 * y).square().mean()


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda g: g / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def trained(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[float]:
    """Losses of five steps, then the sums of what forward left behind."""
    SEEN.clear()
    random.seed(1)
    torch.manual_seed(2)
    found = []
    for _ in range(5):
        x = torch.randn(6, 4, dtype=torch.float64)
        loss = run(x)
        loss.backward()
        found += [loss.item(), x.sum().item()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    left = [*SEEN, model.total] + ([model.last] if isinstance(model.last, Tensor) else [])
    return found + [x.sum().item() for x in left]


@pytest.mark.parametrize("kind", [Keeps, Collects, Draws, Changes, Assigns, Branches, Hooked])
def test_the_backend_runs_what_compile_names_it_for(kind: type[Base]) -> None:
    plain, compiled = kind(), kind()
    torch._dynamo.reset()
    expected = trained(plain, plain)
    assert trained(compiled, torch.compile(compiled, backend="autopar")) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(CaptureError, match=r'torch\.compile\(model, backend="autopar"\)'):
        autopar.compile(kind()).step(torch.randn(6, 4, dtype=torch.float64))
