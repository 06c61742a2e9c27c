"""Tiny models, and plans for them made by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, loss_fn
from torch import Tensor, nn

from tests.support.experts import Routed, routes
from tests.support.odd.odd_widths import OddWidths, loss_of
from tests.support.odd.odd_widths import batch as odd_batch

Batch = tuple[Tensor, ...]


class MLP(nn.Module):
    """Two linear maps around a ReLU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Normed(nn.Module):
    """A map between batch norms: it has buffers that training changes.

    Nothing is added right before a batch norm, which would take it away again: the gradient of such a bias is
    rounding, and Adam makes steps of it.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width, bias=False)
        self.second = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.linear(self.first(x).tanh()))


class Tied(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self, vocabulary: int = 16, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Odd(nn.Module):
    """No size of it divides by 3 or 4, and one is less than 3."""

    def __init__(self, vocabulary: int = 97, width: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, 2)
        self.up = nn.Linear(2, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        return self.head(x + self.up(torch.tanh(self.down(x))))


class Mixture(nn.Module):
    """Rows go to the best two of four experts, in bfloat16: a captured `grouped_mm` takes nothing else."""

    def __init__(self, width: int = 8, inner: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2)
        ordered, order = chosen.reshape(-1).sort()
        ends = F.one_hot(ordered, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        rows = x.bfloat16()[order // 2]
        y = F.grouped_mm(rows, self.up.bfloat16(), offs=ends).relu()
        y = F.grouped_mm(y, self.down.bfloat16(), offs=ends)[order.argsort()].float()
        return x + (y.view(len(x), 2, -1) * share.unsqueeze(-1)).sum(1)


class RootOfProduct(nn.Module):
    """Its loss is finite at zero, where its gradient is infinity times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).abs().sqrt().sum()


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch, object]:
    """(model, batch, loss) by name; the same in every process."""
    torch.manual_seed(0)
    if name == "mlp":
        return (MLP().to(dtype), (torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)), mean_square)
    if name == "mixture":
        return Mixture(), (torch.randn(16, 8), torch.randn(16, 8)), mean_square
    if name == "routed":  # of the rows all go to one expert and none to another
        batch = (torch.randn(16, 8, dtype=dtype), routes("skewed", 16), torch.randn(16, 8, dtype=dtype))
        return Routed().to(dtype), batch, mean_square
    if name == "normed":
        return (Normed().to(dtype), (torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)), mean_square)
    if name == "tied":
        tokens = torch.randint(0, 16, (8, 4))
        return Tied().to(dtype), (tokens, tokens.roll(1, 1)), loss_fn
    if name == "odd":
        tokens = torch.randint(0, 97, (12, 4))
        return Odd().to(dtype), (tokens, tokens.roll(1, 1)), loss_fn
    if name == "odd widths":
        return OddWidths().to(dtype), odd_batch(6), loss_of
    assert name == "gpt", name
    tokens = torch.randint(0, 256, (8, 8))
    model = GPT(GPTConfig(seq_len=8, layers=2, heads=4, width=16)).to(dtype)
    return model, (tokens, tokens.roll(1, 1)), loss_fn


def make_on(device: str, name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch, object]:
    """The same on a device."""
    model, batch, loss = make(name, dtype)
    return model.to(device), tuple(x.to(device) for x in batch), loss
