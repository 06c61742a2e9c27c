"""The share of each micro-batch in the loss, by brute force: the loss of the batch from those of its parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.analysis.objective import Objective, objective_of
from autopar.planning.planning import prepare_step
from tests.analysis.losses import LOSSES, NO_SHARES, ROWS, Words, batch

PARTS = 4


def found(loss: Callable[..., Tensor], rows: int) -> tuple[Words, Objective]:
    torch.manual_seed(0)
    model = Words().double()
    part = tuple(x[:rows] if x.ndim else x for x in batch(loss))
    prepared = prepare_step(model, part, loss_fn=loss)
    return model, objective_of(prepared.captured, prepared.analysis.graph)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_parts_with_their_shares_are_the_loss_of_the_batch(name: str) -> None:
    loss, kind = LOSSES[name]
    model, objective = found(loss, ROWS // PARTS)
    assert objective.kind == kind
    whole = batch(loss)
    parts = [[x.chunk(PARTS)[i] if x.ndim else x for x in whole] for i in range(PARTS)]
    named = [{f"batch_{j}": x for j, x in enumerate(part)} for part in parts]
    shares = objective.shares(named)
    losses = [loss(model(part[0]), *part[1:]) for part in parts]
    total = torch.stack([s * x for s, x in zip(shares, losses, strict=True)]).sum()
    assert total.item() == pytest.approx(loss(model(whole[0]), *whole[1:]).item(), rel=1e-12)


@pytest.mark.parametrize("loss", NO_SHARES, ids=lambda loss: loss.__name__)
def test_a_loss_that_no_shares_put_together_is_unknown(loss: Callable[..., Tensor]) -> None:
    assert not found(loss, ROWS)[1].is_known


def test_a_mean_needs_no_denominator() -> None:
    shares = Objective("mean").shares([{}, {}])
    assert [x.item() for x in shares] == [0.5, 0.5]
    assert [x.item() for x in Objective("sum").shares([{}, {}])] == [1.0, 1.0]
