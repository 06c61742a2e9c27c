"""On real ranks too the loss, gradients and their norm are those of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from tests.analysis.losses import COUNTING, LOSSES, Words, batch, each, plus_rows
from tests.runtime.ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

_COUNTED = "divided by a tensor of that number"
ALL = LOSSES | {_COUNTED: COUNTING[_COUNTED]}
pytestmark = pytest.mark.multiprocess

NAMES = list(ALL)  # tests/proof/test_objective.py simulates LOSSES on every mesh
STAGES: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 4}
TWO_AXES: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "micro_batches": 1}
WAYS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "2 ranks, accumulation": (2, NAMES, {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 4}),
    "2 stages": (2, NAMES[::2], {"mesh": {"pp": 2}, "micro_batches": 4}),
    "4 ranks, 2 stages": (4, [*NAMES[1::4], _COUNTED], STAGES),
    "4 ranks": (4, NAMES[::4], TWO_AXES),
    "2 ranks, every loss": (2, NAMES, {"mesh": {"dp": 2}, "micro_batches": 1}),
    "2 stages, other losses": (2, NAMES[1::2], {"mesh": {"pp": 2}, "micro_batches": 4}),
    "4 ranks, 2 stages, every loss": (4, NAMES, STAGES),
    "4 ranks, every loss": (4, NAMES, TWO_AXES),
    "4 ranks, accumulation, every loss": (
        4,
        NAMES,
        {"mesh": {"dp": 2, "tp": 2}, "micro_batches": 2},
    ),
}
ALWAYS = [way for way in WAYS if "loss" not in way]


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


@captured_once()
def on_a_rank(names: list[str], options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Each of the named losses and the norm of its gradients on this rank."""
    found = {}
    for name in names:
        loss, _ = ALL[name]
        made = autopar.compile(words(), loss_fn=loss, **options)
        value = made.step(*batch(loss)).item()
        found[name] = value, made.clip_grad_norm_(1e9).item()
    return found


def in_one_process() -> dict[str, tuple[float, float]]:
    found = {}
    for name, (loss, _) in ALL.items():
        model, (tokens, *targets) = words(), batch(loss)
        value = loss(model(tokens), *targets)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        found[name] = value.item(), norm.item()
    return found


@pytest.mark.parametrize("way", often(WAYS, ALWAYS))
def test_losses_are_those_of_one_process(way: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    count, names, options = WAYS[way]
    ranks = two_ranks if count == 2 else four_ranks
    expected = in_one_process()
    for found in ranks.run(on_a_rank, names, options):
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name


def test_a_loss_that_micro_batches_change_is_said_with_its_op() -> None:
    made = autopar.compile(words(), loss_fn=plus_rows, micro_batches=2)
    with pytest.warns(
        UserWarning, match=r"In 2 micro-batches the loss is the mean .*: add \(in the loss"
    ):
        found = made.step(*batch(plus_rows)).item()
    parts = zip(*(x.chunk(2) for x in batch(plus_rows)), strict=True)
    losses = [plus_rows(words()(tokens), targets).item() for tokens, targets in parts]
    assert found == pytest.approx(sum(losses) / 2, rel=1e-12)


def divided_by(rows: list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(y: Tensor, targets: Tensor) -> Tensor:
        return each(y, targets).sum() / rows[0]

    return loss


@pytest.mark.parametrize(
    "numbers", often([[8.0, 8.0], [5.0, 8.0], [8.0, 5.0, 8.0]], [[5.0, 8.0], [8.0, 5.0, 8.0]])
)
def test_a_number_that_equals_the_rows_is_a_number_whatever_came_before(
    numbers: list[float],
) -> None:
    """It is built in at first, and an input of the program once it has changed."""
    rows = [numbers[0]]
    made = autopar.compile(words(), loss_fn=divided_by(rows), micro_batches=2)
    for rows[0] in numbers:
        found = made.step(*batch(plus_rows)).item()
    tokens, targets = batch(plus_rows)
    assert found == pytest.approx(divided_by([8.0])(words()(tokens), targets).item(), rel=1e-12)
