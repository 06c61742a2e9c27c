"""Losses outside of the model on real ranks: two steps of each, of one compiled model."""

from __future__ import annotations

import dataclasses

import pytest

import autopar
from benchmarks.parity.outside_losses import LOSSES, Row, compiled, fresh, row, summed_over_ranks, trained
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


@captured_once()
def found(recipe: str) -> list[Row]:
    """A row for each loss; what is refused is noted in its row."""
    model, first, rows = compiled(2, recipe), fresh(2).state_dict(), []
    for loss_of in LOSSES:
        model.load_state_dict(first, strict=recipe != "pp")
        model.zero_grad()
        try:
            own = trained(model, loss_of, steps=2)
        except autopar.StepError as error:
            rows.append(Row(loss_of.__name__, refused=str(error)))
            continue
        names = [*dict(model.named_parameters()), "head.scale"]
        rows.append(row(loss_of.__name__, own, trained(fresh(2), loss_of, steps=2), names))
    return rows


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("recipe", ["tp+sp", "pp"])
def test_losses_outside_of_the_model_are_those_of_one_process(two_ranks: Ranks, recipe: str) -> None:
    refused = {summed_over_ranks.__name__, *(["penalized"] if recipe == "pp" else [])}
    for rows in two_ranks.run(found, recipe):
        assert {each.name for each in rows if each.refused} == refused
        assert all(each.passes for each in rows if not each.refused), [dataclasses.asdict(each) for each in rows]
