"""The share of each micro-batch in the loss, by brute force: the loss of the batch from those of its parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.analysis.objective import Objective, objective_of
from autopar.errors import StepError
from autopar.planning.planning import prepare_step
from tests.analysis.losses import IGNORED, LOSSES, NO_SHARES, ROWS, Words, batch, ignoring

PARTS = 4


def found(loss: Callable[..., Tensor], rows: int) -> tuple[Words, Objective, list[str]]:
    torch.manual_seed(0)
    model = Words().double()
    part = tuple(x[:rows] if x.ndim else x for x in batch(loss))
    prepared = prepare_step(model, part, loss_fn=loss)
    captured = prepared.captured
    return model, objective_of(captured, prepared.analysis.graph), list(captured.inputs.values())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_parts_with_their_shares_are_the_loss_of_the_batch(name: str) -> None:
    loss, kind = LOSSES[name]
    model, objective, names = found(loss, ROWS // PARTS)
    assert objective.kind == kind
    whole = batch(loss)
    parts = [[x.chunk(PARTS)[i] if x.ndim else x for x in whole] for i in range(PARTS)]
    named = [dict(zip(names, part, strict=True)) for part in parts]
    shares = objective.shares(named)
    losses = [loss(model(part[0]), *part[1:]) for part in parts]
    total = torch.stack([s * x for s, x in zip(shares, losses, strict=True)]).sum()
    assert total.item() == pytest.approx(loss(model(whole[0]), *whole[1:]).item(), rel=1e-12)


def test_micro_batches_of_one_row_have_their_shares_too() -> None:
    """Rows with 4, 3, 2 and 1 targets that count, twice: 20 in all."""
    _, objective, names = found(ignoring, 1)
    parts = [
        dict(zip(names, pair, strict=True))
        for pair in zip(*(x.chunk(ROWS) for x in batch(ignoring)), strict=True)
    ]
    assert objective.shares(parts) == pytest.approx([n / 20 for n in (4, 3, 2, 1, 4, 3, 2, 1)])


@pytest.mark.parametrize("loss", NO_SHARES, ids=lambda loss: loss.__name__)
def test_a_loss_that_no_shares_put_together_is_unknown(loss: Callable[..., Tensor]) -> None:
    assert not found(loss, ROWS)[1].is_known


def test_a_mean_needs_no_denominator() -> None:
    shares = Objective("mean").shares([{}, {}])
    assert shares == [0.5, 0.5]
    assert Objective("sum").shares([{}, {}]) == [1.0, 1.0]


def test_a_micro_batch_of_ignored_targets_alone_is_refused() -> None:
    _, objective, names = found(ignoring, 2)
    tokens, targets = batch(ignoring)
    named = [
        dict(zip(names, (tokens[:2], t), strict=True))
        for t in (targets[:2], torch.full_like(targets[:2], IGNORED))
    ]
    with pytest.raises(StepError, match="Micro-batch 2 of 2 has no element that counts"):
        objective.shares(named)
