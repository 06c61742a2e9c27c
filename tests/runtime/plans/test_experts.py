"""A mixture of experts on real ranks has the gradients of one process: rows split, the experts, and both."""

from __future__ import annotations

import pytest
from torch import Tensor

import autopar
from autopar.capture.export import run_with_loss
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.support.staged import captured_once
from tests.support.tolerances import TOLERANCE_HALF

pytestmark = pytest.mark.multiprocess

MESH = {"dp": 2, "ep": 2}
RECIPES = ({"dp": "zero3", "ep": "ep"}, {"dp": "ep", "ep": "tp"}, "zero3")


def errors(recipe: str | dict[str, str]) -> dict[str, float]:
    """Errors of the loss and of every gradient, relative to its largest entry."""
    model, batch, loss_fn = make("mixture")
    expected = run_with_loss(model, batch, {}, loss_fn)  # type: ignore[arg-type]
    expected.backward()
    wanted = {"loss": expected.detach()}
    wanted |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    made = autopar.compile(make("mixture")[0], loss_fn=loss_fn, mesh=MESH, recipe=recipe)  # type: ignore[arg-type]
    found: dict[str, Tensor] = {"loss": made.step(*batch).detach()}
    found |= {n: p.grad.full_tensor() for n, p in made.named_parameters()}  # type: ignore[union-attr]
    return {n: float((found[n] - x).abs().max() / x.abs().max()) for n, x in wanted.items()}


@captured_once()
def all_ways() -> list[dict[str, float]]:
    return [errors(recipe) for recipe in RECIPES]


def test_a_mixture_has_the_gradients_of_one_process(four_ranks: Ranks) -> None:
    for rank in four_ranks.run(all_ways):
        for found in rank:
            assert set(found) == {"loss", "router.weight", "router.bias", "up", "down"}
            assert max(found.values(), key=nan_last) < TOLERANCE_HALF, found
