"""Small models, each with something that models do to their state or inputs, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.export import run_with_loss
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Normed, Tied, mean_square
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


class InPlace(nn.Module):
    """Ops in place, on whole tensors, slices, views and through an index."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_() * 2
        y[:, :4] *= 2
        y[:, 5] = 1.5
        y.view(-1, 4, 4)[:, 0] += y[:, :4].detach()
        y.masked_fill_(y > 3, 3.0)
        out = torch.zeros_like(y)
        out[:, torch.tensor([3, 1])] = y[:, :2]
        return self.second(out.add_(y)).clamp_(-2, 2)


class Twice(nn.Module):
    """A layer that runs twice, and a weight that is used as it is, transposed and elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return x @ self.weight + x @ self.weight.T + self.weight.square().sum(0)


class Partly(nn.Module):
    """One layer is frozen, one has a frozen bias alone, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.used.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.used(self.frozen(x))))


class ManyOutputs(nn.Module):
    """Several outputs in a tree, of which the loss takes some; an optional and a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, *, scale: Tensor | None = None, power: int = 1
    ) -> dict[str, Any]:
        left = self.left(x) if bias is None else self.left(x) + bias
        right = self.right(left) if scale is None else self.right(left * scale[:, None])
        return {"pair": (left, right**power), "count": 3, "nothing": None, "mean": left.mean(1)}


def of_many(result: dict[str, Any]) -> Tensor:
    left, right = result["pair"]
    return left.square().mean() + right.mean() * result["count"] + result["mean"].pow(3).mean()


class Mixed(nn.Module):
    """Integer inputs of two kinds and a boolean one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
        x = self.table(tokens.long()) * keep[..., None]
        x = torch.gather(x, 1, chosen[:, :, None].expand(-1, -1, 8))
        return self.head(torch.where(keep[:, :2, None], x, x.detach() * 0.5).sum(1))


class Averages(nn.Module):
    """Buffers that the forward changes by itself: a count, and a running mean over the whole batch."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.count += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


class Images(nn.Module):
    """Batch statistics of images, kept and not kept, and statistics of groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4),
            nn.BatchNorm2d(4, momentum=0.3),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.GroupNorm(2, 4),
        )
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norms(self.conv(x)).mean((2, 3)))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    loss_fn: Any = mean_square
    recipes: tuple[str, ...] = ("zero1",)
    kwargs: Callable[[], dict[str, Any]] = dict


def vectors(*more: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(8, 8).double(), *(each() for each in more))


def target() -> Tensor:
    return torch.randn(8, 8).double()


def words() -> tuple[Any, ...]:
    tokens = torch.randint(16, (8, 4))
    return tokens, tokens.roll(1, 1)


def mixed() -> tuple[Any, ...]:
    tokens, chosen = torch.randint(16, (8, 4), dtype=torch.int32), torch.randint(4, (8, 2))
    return tokens, chosen, torch.rand(8, 4) > 0.4, torch.randint(4, (8,))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASES = {
    "in-place ops": Case(InPlace, vectors(target), recipes=("ddp", "tp")),
    "tied": Case(Tied, words, token_loss, ("tp+sp",)),
    "used twice": Case(Twice, vectors(target), recipes=("zero3",)),
    "frozen and unused": Case(Partly, vectors(target), recipes=("zero2",)),
    "many outputs": Case(ManyOutputs, vectors(), of_many, ("zero1",)),
    "optional and keyword inputs": Case(
        ManyOutputs, vectors(target), of_many, ("tp",), kwargs=lambda: {"scale": torch.rand(8).double(), "power": 2}
    ),
    "none given for an optional input": Case(
        ManyOutputs, vectors(lambda: None), of_many, ("zero3",), kwargs=lambda: {"scale": None}
    ),
    "integers and booleans": Case(Mixed, mixed, F.cross_entropy, ("zero1",)),
    "batch norm": Case(Normed, vectors(target), recipes=("zero3",)),
    "own buffers": Case(Averages, vectors(target), recipes=("zero2",)),
    "norms of images": Case(Images, lambda: (torch.randn(8, 2, 4, 4).double(), target()), recipes=("ddp", "tp")),
    "a loss without a signature": Case(lambda: nn.Linear(8, 8), vectors(), torch.mean, ("ddp",)),
}


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@captured_once()
def compare(case: Case, recipe: str) -> float:
    """The largest difference of losses, gradients and buffers in two steps; 1 where a gradient is missing."""
    torch.manual_seed(0)
    model, batch, kwargs = case.make().double(), case.batch(), case.kwargs()
    reference = copy.deepcopy(model)
    axis = "tp" if recipe.startswith("tp") else "dp"
    made = autopar.compile(model, loss_fn=case.loss_fn, mesh={axis: 2}, recipe=recipe)
    found = []
    for _ in range(2):
        expected = run_with_loss(reference, batch, kwargs, case.loss_fn)
        expected.backward()
        found.append(made.step(*batch, **kwargs) - expected.detach())
    for a, b in zip(made.parameters(), reference.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            found.append(torch.tensor(float((a.grad is None) != (b.grad is None))))
        else:
            found.append(full(a.grad) - b.grad)
    found += [full(a) - b for a, b in zip(made.buffers(), reference.buffers(), strict=True)]
    return max((x.abs().max().item() for x in found), key=nan_last)


def all_cases() -> dict[str, float]:
    return {f"{name} under {recipe}": compare(case, recipe) for name, case in CASES.items() for recipe in case.recipes}


def test_small_models_equal_one_device(two_ranks: Ranks) -> None:
    for found in two_ranks.run(all_cases):
        assert {name: worst for name, worst in found.items() if worst > 1e-9} == {}
