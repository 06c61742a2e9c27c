"""Ops whose axes nest in another order than that of the mesh, run by several processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.api import front_door
from autopar.errors import PlanError
from autopar.ir import Plan, S, nested_labels
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make, make_on
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

SHARDED_ROWS = {"tp": "tp+sp", "tq": "tp+sp"}
SHARDED_BATCH = {"tp": "zero3", "tq": "zero3"}


@captured_once(front_door)
def turned(recipe: Any, **asked: Any) -> Plan:
    """The plan of a small GPT on two axes of two, all of whose ops nest in the order tq, tp."""
    model, batch, loss_fn = make("gpt")
    rows = len(batch[0]) // asked.get("micro_batches", 1)
    plan = autopar.explain(
        model,
        tuple(x[:rows] for x in batch),
        loss_fn=loss_fn,
        mesh="tp=2,tq=2",
        recipe=recipe,
        cluster="h100x4",
        **asked,
    ).plan
    ops = {name: nested_labels(labels, (1, 0)) for name, labels in plan.ops.items()}
    assert ops != plan.ops
    return replace(plan, ops=ops)


@captured_once()
def trained(text: str) -> dict[str, Any]:
    model, batch, loss_fn = make_on("cpu", "gpt")
    made = autopar.compile(model, loss_fn=loss_fn, plan=Plan.parse(text), example_inputs=batch)
    assert "^1" in str(made.plan)
    return train(made, made.step, batch)


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        (SHARDED_ROWS, {}),
        (SHARDED_BATCH, {}),
        (SHARDED_ROWS, {"micro_batches": 2}),
        (SHARDED_ROWS, {"recompute": "full"}),
        (SHARDED_ROWS, {"decompose": "tq"}),
    ],
    ids=["tp+sp", "zero3", "micro-batches", "recomputed", "decomposed"],
)
def test_ranks_train_as_one_process(four_ranks: Ranks, recipe: Any, asked: dict[str, Any]) -> None:
    expected = single("gpt")
    for found in four_ranks.run(trained, str(turned(recipe, **asked))):
        assert difference(found, expected) < 1e-9


def test_parameters_keep_the_order_of_the_mesh() -> None:
    plan = turned(SHARDED_BATCH)
    name = next(name for name, how in plan.parameters.items() if how.storage == (S(0), S(0)))
    how = replace(plan.parameters[name], storage=(S(0)._replace(depth=1), S(0)))
    model, batch, loss_fn = make("gpt")
    wrong = replace(plan, parameters={**plan.parameters, name: how})
    with pytest.raises(PlanError, match=r"S\(0\)@tq S\(0\)@tp, .* Write S\(0\)@tp S\(0\)@tq"):
        autopar.verify(model, batch, loss_fn=loss_fn, plan=wrong, mesh=plan.mesh)
