"""Skewed routing: what the rank of the fullest expert computes and sends, and models without such experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.explanation.explanation import Explanation
from autopar.ops.exchange import EXCHANGES
from tests.support.experts import Routed, routes


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Routed(width=256, inner=1024)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(x, ids).square().mean()


def explained(skew: float, recipe: str = "ep") -> Explanation:
    batch = torch.randn(8192, 256), routes("even", 8192)
    return autopar.explain(Loss(), batch, cluster="h100x2", mesh={"x": 2}, recipe=recipe, skew=skew)


def sent_bytes(found: Explanation) -> float:
    return sum(float(i.count * i.traffic_bytes) for i in found.step.items if i.kind in EXCHANGES)


def test_messages_time_and_memory_grow_with_the_skew() -> None:
    even, skewed = explained(1), explained(1.5)
    assert sent_bytes(skewed) == pytest.approx(1.5 * sent_bytes(even))
    assert skewed.step_seconds > even.step_seconds
    assert skewed.memory_bytes > even.memory_bytes
    assert any("priced as if the fullest had 1.5 times its share" in note for note in skewed.plan.notes)


def test_a_skew_that_changes_no_price_says_so() -> None:
    """Data parallelism leaves all experts on each rank, which runs the rows that it has, wherever they go."""
    even, skewed = (explained(skew, "ddp") for skew in (1, 1.5))
    assert skewed.step_seconds == even.step_seconds
    assert any("skew=1.5 changes no price: no axis splits the experts" in note for note in skewed.plan.notes)
    assert not any("skew" in note for note in even.plan.notes)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"skew=1\.5 says how full an expert is, .* Leave skew out"):
        autopar.explain(nn.Linear(4, 4), (torch.randn(8, 4),), loss_fn=torch.sum, cluster="h100x2", skew=1.5)


@pytest.mark.parametrize("skew", [0.5, float("nan"), float("inf"), "much"])
def test_a_skew_is_a_number_of_at_least_one(skew: object) -> None:
    with pytest.raises(AutoparError, match=r"write 1 or more, such as 1\.3"):
        autopar.explain(nn.Linear(4, 4), (torch.randn(8, 4),), loss_fn=torch.sum, cluster="h100x2", skew=skew)
