"""Micro-batches of different sizes: loss and all gradients of a batch that their number does not divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir import SCHEDULES
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.pipeline.staged_runs import gradients
from tests.support.staged import captured_once
from tests.support.tables import often

ROWS = [30, 7, 32]  # in 4: 8, 8, 7, 7 and 2, 2, 2, 1, and once in equal parts
IGNORED = -100


class Net(nn.Module):
    """Blocks of one width, of which stages can be made."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def mean(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).mean()


def added_up(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).sum() / 7


def masked(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y, labels, ignore_index=IGNORED)


def by_rows(y: Tensor, labels: Tensor) -> Tensor:
    return (y * y).sum() / len(labels)


def two_terms(y: Tensor, labels: Tensor) -> Tensor:
    return masked(y, labels) + 0.1 * (y.logsumexp(-1) ** 2).mean()


def ratio(y: Tensor, labels: Tensor) -> Tensor:
    counts = (labels != IGNORED).double()
    return ((y * y).sum(-1) * counts).sum() / counts.sum()


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [mean, added_up, masked, by_rows, two_terms, ratio]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of numbers, and labels of which every third is ignored but the last."""
    drawn = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=drawn, dtype=torch.float64)
    labels = torch.randint(6, (rows,), generator=drawn)
    labels[1:-1:3] = IGNORED
    return x, labels


def in_one_process(loss: Callable[[Tensor, Tensor], Tensor], rows: int) -> tuple[float, dict[str, Tensor]]:
    model, (x, labels) = net(), batch(rows)
    found = loss(model(x), labels)
    found.backward()
    return found.item(), gradients(model)


def compiled(loss: Callable[[Tensor, Tensor], Any], **options: Any) -> autopar.CompiledModule:
    return autopar.compile(net(), loss_fn=loss, micro_batches=4, **options)


Found = dict[tuple[str, int], tuple[float, dict[str, Tensor]]]


@captured_once()
def on_a_rank(losses: list[Callable[[Tensor, Tensor], Tensor]], options: dict[str, Any]) -> Found:
    """By loss and rows, the loss and this rank's gradients, of steps of one compiled module."""
    found: Found = {}
    for loss in losses:
        made = compiled(loss, **options)
        for rows in ROWS:
            value = made.step(*batch(rows)).item()
            found[loss.__name__, rows] = value, gradients(made)
            made.zero_grad()
    return found


def assert_as_in_one_process(parts: list[Found], losses: list[Callable[[Tensor, Tensor], Tensor]]) -> None:
    """Every rank has the loss, each of its gradients is right, and no gradient is missing from all."""
    for loss in losses:
        for rows in ROWS:
            value, expected = in_one_process(loss, rows)
            names: set[str] = set()
            for part in parts:
                own, grads = part[loss.__name__, rows]
                assert own == pytest.approx(value, rel=1e-12), (loss, rows)
                for name, gradient in grads.items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13)
                names |= grads.keys()
            assert names == expected.keys()


def test_a_single_process_has_the_loss_and_gradients_of_the_batch() -> None:
    assert_as_in_one_process([on_a_rank(LOSSES, {})], LOSSES)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "zero1": (2, {"mesh": {"dp": 2}, "recipe": "zero1"}),
    "zero2": (2, {"mesh": {"dp": 2}, "recipe": "zero2"}),
    "zero3": (2, {"mesh": {"dp": 2}, "recipe": "zero3"}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "two at a time": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "overlap_batches": 2}),
    "three ranks": (3, {"mesh": {"dp": 3}, "recipe": "zero3"}),
    "three ranks, ddp": (3, {"mesh": {"dp": 3}, "recipe": "ddp"}),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", often(WAYS, ("ddp", "zero3", "tp", "three ranks")))
def test_ranks_have_the_loss_and_gradients_of_one_process(way: str, two_ranks: Ranks, three_ranks: Ranks) -> None:
    count, options = WAYS[way]
    ranks = two_ranks if count == 2 else three_ranks
    assert_as_in_one_process(ranks.run(on_a_rank, LOSSES, options), LOSSES)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", often(SCHEDULES, ("gpipe", "1f1b", "interleaved", "zb")))
def test_stages_have_the_loss_and_gradients_of_one_process(two_ranks: Ranks, schedule: str) -> None:
    parts = two_ranks.run(on_a_rank, LOSSES[2:], {"mesh": {"pp": 2}, "schedule": schedule})
    assert_as_in_one_process(parts, LOSSES[2:])
