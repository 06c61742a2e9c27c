"""The share of each micro-batch in the loss, by brute force: the loss of the batch from those of its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.analysis.objective import MicroBatch, Objective, equal_parts, objective_of
from autopar.errors import StepError
from autopar.planning.planning import Prepared, prepare_step
from tests.analysis.losses import COUNTING, IGNORED, LOSSES, NO_SHARES, ROWS, TERMS, Words, batch, ignoring

ALL = LOSSES | COUNTING


@functools.cache
def prepared(loss: Callable[..., Tensor], rows: int) -> Prepared:
    part = tuple(x[:rows] if x.ndim else x for x in batch(loss))
    return prepare_step(words(), part, loss_fn=loss)


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def found(loss: Callable[..., Tensor], parts: int) -> tuple[Words, Objective, list[str]]:
    """The model, its objective over so many micro-batches, and the names of the inputs."""
    captured = prepared(loss, ROWS // parts).captured
    objective = objective_of(captured, prepared(loss, ROWS).whole)
    return words(), objective, list(captured.inputs.values())


@pytest.mark.parametrize("parts", [2, ROWS])
@pytest.mark.parametrize("name", ALL)
def test_losses_of_parts_with_their_shares_are_the_loss_of_the_batch(name: str, parts: int) -> None:
    loss, kind = ALL[name]
    model, objective, names = found(loss, parts)
    assert objective.kind == kind
    whole = batch(loss)
    pieces = [[x.chunk(parts)[i] if x.ndim else x for x in whole] for i in range(parts)]
    shares = objective.shares(equal_parts(objective, [dict(zip(names, piece, strict=True)) for piece in pieces]))
    losses = [loss(model(piece[0]), *piece[1:]) for piece in pieces]
    total = torch.stack([s * x for s, x in zip(shares, losses, strict=True)]).sum()
    assert total.item() == pytest.approx(loss(model(whole[0]), *whole[1:]).item(), rel=1e-12)


@pytest.mark.parametrize("loss", NO_SHARES, ids=lambda loss: loss.__name__)
def test_a_loss_that_no_shares_put_together_is_unknown(loss: Callable[..., Tensor]) -> None:
    assert not found(loss, 2)[1].is_known


def test_nothing_is_known_of_terms_where_a_micro_batch_runs_other_ops() -> None:
    def changing(y: Tensor, targets: Tensor) -> Tensor:
        y = y.relu() if len(y) == 1 else y.tanh()
        return y.mean() + y.amax()

    part, whole = (prepare_step(nn.Linear(2, 2), (torch.ones(n, 2),) * 2, loss_fn=changing) for n in (1, 2))
    objective = objective_of(part.captured, whole.whole)
    assert "runs other ops for a micro-batch" in objective.obstacle


@pytest.mark.parametrize("name", TERMS)
def test_a_sum_of_ratios_has_terms(name: str) -> None:
    _, objective, _ = found(TERMS[name], 2)
    assert objective.kind == "terms"
    assert {term.objective.kind for term in objective.terms} == {"ratio", "mean"}


def test_a_mean_needs_no_denominator() -> None:
    mean, added_up = Objective("mean"), Objective("sum")
    assert mean.shares(equal_parts(mean, [{}, {}])) == [0.5, 0.5]
    assert mean.shares([MicroBatch({}, rows, mean) for rows in (3, 1)]) == [0.75, 0.25]
    assert added_up.shares(equal_parts(added_up, [{}, {}])) == [1.0, 1.0]


def test_a_micro_batch_of_ignored_targets_alone_is_refused() -> None:
    _, objective, names = found(ignoring, 4)
    tokens, targets = batch(ignoring)
    named = [
        dict(zip(names, (tokens[:2], t), strict=True)) for t in (targets[:2], torch.full_like(targets[:2], IGNORED))
    ]
    with pytest.raises(StepError, match="Micro-batch 2 of 2 has no element that counts"):
        objective.shares(equal_parts(objective, named))
    assert objective.shares(equal_parts(objective, named), skips_empty=True) == [1.0, 0.0]
