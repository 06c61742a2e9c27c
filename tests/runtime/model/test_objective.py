"""On real ranks too the loss, gradients and their norm are those of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from tests.analysis.losses import (
    COUNTING,
    IGNORED,
    LOSSES,
    TERMS,
    Words,
    batch,
    each,
    mean_of_squares,
    means_of_groups,
    plus_rows,
)
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

_COUNTED = "divided by a tensor of that number"
ALL = {name: loss for name, (loss, _) in LOSSES.items()} | TERMS | {_COUNTED: COUNTING[_COUNTED][0]}
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
    "4 ranks, accumulation, every loss": (4, NAMES, {"mesh": {"dp": 2, "tp": 2}, "micro_batches": 2}),
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
        loss = ALL[name]
        made = autopar.compile(words(), loss_fn=loss, **options)
        value = made.step(*batch(loss)).item()
        found[name] = value, made.clip_grad_norm_(1e9).item()
    return found


def in_one_process() -> dict[str, tuple[float, float]]:
    found = {}
    for name, loss in ALL.items():
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


def with_empty_parts(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """A batch of which rows 0 and 1, and row 4, have ignored targets alone: a whole micro-batch, however it is cut."""
    tokens, targets, *more = batch(loss)
    targets = targets.clone()
    targets[[0, 1, 4]] = IGNORED
    return tokens, targets, *more


def of_empty_parts(options: dict[str, Any]) -> dict[str, list[float]]:
    """Loss and gradients of every loss of terms."""
    found = {}
    for name, loss in TERMS.items():
        model = autopar.compile(words(), loss_fn=loss, **options) if options else words()
        given = with_empty_parts(loss)
        value = model.step(*given) if options else loss(model(given[0]), *given[1:])
        if not options:
            value.backward()
        grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
        found[name] = [value.item(), *(g.cos().sum().item() for g in grads), *(g.abs().sum().item() for g in grads)]
    return found


@captured_once()
def of_empty_parts_on_a_rank(options: dict[str, Any]) -> dict[str, list[float]]:
    return of_empty_parts(options)


def test_a_term_without_an_element_in_a_micro_batch_is_left_out() -> None:
    expected, found = of_empty_parts({}), of_empty_parts({"micro_batches": 4})
    for name in TERMS:
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_term_without_an_element_is_left_out_on_all_ranks(mesh: dict[str, int], two_ranks: Ranks) -> None:
    expected = of_empty_parts({})
    for found in two_ranks.run(of_empty_parts_on_a_rank, {"mesh": mesh, "micro_batches": 4}):
        for name in TERMS:
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name


def by_few(y: Tensor, targets: Tensor) -> Tensor:
    """All errors over the number of targets that count, beside a mean."""
    return (y * y).sum() / (targets != IGNORED).sum() + mean_of_squares(y, targets)


def test_a_numerator_over_nothing_is_refused() -> None:
    made = autopar.compile(words(), loss_fn=by_few, micro_batches=4)
    with pytest.raises(autopar.StepError, match="denominator of 0 and a numerator that is not 0"):
        made.step(*with_empty_parts(by_few))


def test_a_loss_that_micro_batches_change_is_refused_with_its_op() -> None:
    made = autopar.compile(words(), loss_fn=plus_rows, micro_batches=2)
    with pytest.raises(autopar.StepError, match=r"2 micro-batches would give another .*: add \(in the loss"):
        made.step(*batch(plus_rows))
    parts = zip(*(x.chunk(2) for x in batch(plus_rows)), strict=True)
    followed = autopar.compile(words(), loss_fn=plus_rows)
    losses = [followed.step(*part).item() for part in parts]
    plain = words()
    parts = zip(*(x.chunk(2) for x in batch(plus_rows)), strict=True)
    (sum(plus_rows(plain(tokens), targets) for tokens, targets in parts) / 2).backward()
    for own, expected in zip(followed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad / 2, expected.grad)
    assert len(losses) == 2


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_groups_of_rows_are_rows_of_micro_batches(micro_batches: int) -> None:
    made = autopar.compile(words(), loss_fn=means_of_groups, micro_batches=micro_batches)
    found = made.step(*batch(means_of_groups)).item()
    tokens, targets = batch(means_of_groups)
    assert found == pytest.approx(means_of_groups(words()(tokens), targets).item(), rel=1e-12)


def test_a_micro_batch_smaller_than_a_group_is_refused_with_the_number_of_micro_batches() -> None:
    made = autopar.compile(words(), loss_fn=means_of_groups, micro_batches=8)
    with pytest.raises(RuntimeError) as found:
        made.step(*batch(means_of_groups))
    assert "8 micro-batches" in "".join(found.value.__notes__)


def divided_by(rows: list[float]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(y: Tensor, targets: Tensor) -> Tensor:
        return each(y, targets).sum() / rows[0]

    return loss


@pytest.mark.parametrize("numbers", often([[8.0, 8.0], [5.0, 8.0], [8.0, 5.0, 8.0]], [[5.0, 8.0], [8.0, 5.0, 8.0]]))
def test_a_number_that_equals_the_rows_is_a_number_whatever_came_before(numbers: list[float]) -> None:
    """It is built in at first, and an input of the program once it has changed."""
    rows = [numbers[0]]
    made = autopar.compile(words(), loss_fn=divided_by(rows), micro_batches=2)
    for rows[0] in numbers:
        found = made.step(*batch(plus_rows)).item()
    tokens, targets = batch(plus_rows)
    assert found == pytest.approx(divided_by([8.0])(words()(tokens), targets).item(), rel=1e-12)
