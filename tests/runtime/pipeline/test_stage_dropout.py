"""Dropout on pipeline stages: one mask on both sides of a cut, and none in evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir import Pipeline
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.pipeline.staged_runs import gradients, held
from tests.support.staged import captured_once, prepared_once, with_stages
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


class Dropped(nn.Module):
    """Multiplies by two vectors of ones with a dropout between: their gradients are the mask's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.first, 0.5, self.training) * self.second


def total(y: Tensor) -> Tensor:
    return y.sum()


def dropped_plan(x: Tensor, schedule: str, cut: str) -> autopar.Plan:
    prepared = prepared_once(Dropped(), (x[:2],), total)
    return with_stages(prepared, Pipeline(2, schedule, (cut,)), 4)


@captured_once()
def masks(schedule: str, cut: str) -> list[tuple[float, Tensor]]:
    """The loss and this rank's gradient of three steps."""
    model, x = Dropped(), torch.ones(8, 64)
    made = autopar.compile(model, loss_fn=total, plan=dropped_plan(x, schedule, cut))
    found = []
    for _ in range(3):
        made.zero_grad()
        value = made.step(x).item()
        (name,) = held(made)
        found.append((value, gradients(made)[name]))
    return found


@pytest.mark.parametrize(
    ("schedule", "cut"),
    often(
        [(schedule, cut) for schedule in ("gpipe", "1f1b") for cut in ("native_dropout", "mul_1")],
        [("gpipe", "mul_1"), ("1f1b", "native_dropout")],
    ),
)
def test_both_sides_of_a_cut_see_one_mask(two_ranks: Ranks, schedule: str, cut: str) -> None:
    first, second = two_ranks.run(masks, schedule, cut)
    for (loss, g), (other_loss, other_g) in zip(first, second, strict=True):
        assert loss == other_loss == pytest.approx(g.sum().item(), rel=1e-6)
        assert torch.equal(g, other_g)
        assert 0.5 < g.mean() / 8 < 1.5  # the sum over 8 rows, whose halves are kept and doubled
    assert not torch.equal(first[0][1], first[1][1])


@captured_once()
def modes() -> tuple[float, float, bool]:
    """The loss with dropout and without, and whether the forward without it is the model's."""
    model, x = Dropped(), torch.ones(8, 64)
    made = autopar.compile(model, loss_fn=total, plan=dropped_plan(x, "1f1b", "mul_1"))
    trained = made.step(x).item()
    made.eval()
    with torch.no_grad():
        evaluated, results = made.step(x).item(), made(x)
    return trained, evaluated, torch.equal(results, torch.ones(8, 64))


def test_another_mode_is_another_program_on_the_same_stages(two_ranks: Ranks) -> None:
    trained, evaluated, same = equal_on_all(two_ranks.run(modes))
    assert trained != evaluated == 512 and same  # 8 rows of 64 ones
