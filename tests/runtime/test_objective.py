"""On real ranks too the loss, gradients and their norm are those of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from tests.analysis.losses import LOSSES, Words, batch
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multiprocess

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, accumulation": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 4}),
    "2 stages": (2, {"mesh": {"pp": 2}, "micro_batches": 4}),
    "4 ranks, 2 stages": (4, {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 4}),
    "4 ranks": (4, {"mesh": {"dp": 2, "tp": 2}, "micro_batches": 1}),
}


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def on_a_rank(options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of every loss on this rank."""
    found = {}
    for name, (loss, _) in LOSSES.items():
        made = autopar.compile(words(), loss_fn=loss, **options)
        value = made.step(*batch(loss)).item()
        found[name] = value, made.clip_grad_norm_(1e9).item()
    return found


def in_one_process() -> dict[str, tuple[float, float]]:
    found = {}
    for name, (loss, _) in LOSSES.items():
        model, (tokens, *targets) = words(), batch(loss)
        value = loss(model(tokens), *targets)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        found[name] = value.item(), norm.item()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_eight_losses_are_those_of_one_process(
    way: str, two_ranks: Ranks, four_ranks: Ranks
) -> None:
    count, options = WAYS[way]
    ranks = two_ranks if count == 2 else four_ranks
    expected = in_one_process()
    for found in ranks.run(on_a_rank, options):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name
