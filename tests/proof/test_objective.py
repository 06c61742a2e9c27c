"""Masked means over micro-batches and ranks are means over the whole batch of one device."""

from __future__ import annotations

import itertools

import pytest
import torch

import autopar
from tests.analysis.losses import LOSSES, Words, batch
from tests.support.tables import often

WAYS = {
    "2 ranks": {"mesh": {"dp": 2}, "recipe": "ddp", "micro_batches": 1},
    "2 ranks, accumulation": {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 3},
    "2 stages": {"mesh": {"pp": 2}, "micro_batches": 4},
    "4 ranks, tensor parallel": {"mesh": {"dp": 2, "tp": 2}, "recipe": "dp:ddp,tp:tp"},
    "4 ranks, 2 stages": {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 4, "schedule": "gpipe"},
}


@pytest.mark.parametrize(
    ("name", "way"), often(itertools.product(LOSSES, WAYS), [*zip(LOSSES, itertools.cycle(WAYS), strict=False)])
)
def test_the_loss_and_its_gradients_are_those_of_the_whole_batch(name: str, way: str) -> None:
    torch.manual_seed(0)
    loss, _ = LOSSES[name]
    report = autopar.verify(Words().double(), batch(loss), loss_fn=loss, **WAYS[way])  # type: ignore[arg-type]
    assert report.passed, report
