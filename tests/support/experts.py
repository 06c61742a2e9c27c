"""A hand-written mixture of experts: the number of rows that an expert gets depends on values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    """Two linear layers, which Dynamo traces for every number of rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Every row goes to the expert with the largest share."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, ids = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            out[mask] = expert(rows[mask]) * shares[mask][:, None]
        return out.view_as(x)


class MixtureModel(nn.Module):
    """Two blocks with a residual stream, of 4 experts each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(Mixture(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
