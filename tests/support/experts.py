"""Mixtures of experts written by hand: one whose shapes depend on values, and one that is told where rows go."""

from __future__ import annotations

import importlib

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


class Routed(nn.Module):
    """Gated experts with biases, in any format; which experts a row goes to is an input."""

    def __init__(self, width: int = 8, inner: int = 16, experts: int = 4) -> None:
        super().__init__()
        importlib.import_module("transformers.integrations.moe")  # it defines the product below
        self.first = nn.Linear(width, width)
        self.share = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) / 4)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * inner))
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Rows of shape (t, width) and the experts of each, of shape (t, k) -> rows of shape (t, width)."""
        x, slots = self.first(x), ids.shape[1]
        share = self.share(x).softmax(-1).gather(1, ids)
        ordered, order = ids.reshape(-1).sort()
        ends = F.one_hot(ordered, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        gate, value = (product(x[order // slots], self.up, ends) + self.up_bias[ordered]).chunk(2, -1)
        y = product(F.silu(gate) * value, self.down, ends) * share.reshape(-1)[order].unsqueeze(-1)
        return x + y[order.argsort()].view(len(x), slots, -1).sum(1)


class Integers(nn.Module):
    """Experts of two matrices whose entries are integers, and a matrix that all rows meet before."""

    def __init__(self, width: int = 8, inner: int = 16, experts: int = 4) -> None:
        super().__init__()
        importlib.import_module("transformers.integrations.moe")
        shapes = {"first": (width, width), "up": (experts, width, inner), "down": (experts, inner, width)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randint(-2, 3, shape).float()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """As that of `Routed`, with the results of a row's experts added up."""
        x, slots = x @ self.first, ids.shape[1]
        ordered, order = ids.reshape(-1).sort()
        ends = F.one_hot(ordered, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(product(x[order // slots], self.up, ends).relu(), self.down, ends)
        return x + y[order.argsort()].view(len(x), slots, -1).sum(1)


def routes(kind: str, rows: int, experts: int = 4) -> Tensor:
    """Experts of every row: `even`; `skewed`, where every row goes to the last expert and none to that before it;
    or `lone`, where every row goes to the last and nowhere else."""
    ids = torch.arange(rows)
    if kind == "even":
        return torch.stack([ids % experts, (ids + 1) % experts], 1)
    if kind == "skewed":
        return torch.stack([torch.full_like(ids, experts - 1), ids % (experts - 2)], 1)
    return torch.full((rows, 1), experts - 1)
