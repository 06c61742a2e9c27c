"""Pipeline stages on real ranks: every schedule, what stages share, and where their axis lies, against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import loss_fn
from torch import Tensor, nn

import autopar
from autopar.ir import SCHEDULES, Pipeline
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import Batch, make
from tests.runtime.pipeline.staged_runs import compiled, distance_of, held, single_tied, tied_gpt, together
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once, plan_for, prepared_once, with_stages
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


# --- schedules


@captured_once()
def trained(name: str, schedule: str, ranks: int, mesh: Any, recipe: Any) -> dict[str, Any]:
    model, batch, loss = make(name)
    made = compiled(model, batch, loss, schedule=schedule, ranks=ranks, mesh=mesh, recipe=recipe)
    return train(made, made.step, batch)


def distance(parts: list[dict[str, Any]], name: str) -> float:
    """The largest difference from one process, of every rank with its own losses and parameters."""
    return distance_of(parts, single(name))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(two_ranks: Ranks, schedule: str) -> None:
    assert distance(two_ranks.run(trained, "gpt", schedule, 2, None, "auto"), "gpt") < 1e-9


@pytest.mark.parametrize(
    ("schedule", "mesh", "recipe"),
    [
        pytest.param("1f1b", {"dp": 2}, "zero1", marks=pytest.mark.slow),
        pytest.param("interleaved", {"dp": 2}, "zero2", marks=pytest.mark.slow),
        ("zb", {"dp": 2}, "zero3"),
        ("interleaved", {"dp": 2}, "parameter-server"),
        pytest.param("zbv", {"tp": 2}, "tp", marks=pytest.mark.slow),
        ("dualpipev", {"tp": 2}, "tp+sp"),
    ],
)
def test_schedules_with_other_axes(four_ranks: Ranks, schedule: str, mesh: dict[str, int], recipe: str) -> None:
    assert distance(four_ranks.run(trained, "gpt", schedule, 2, mesh, recipe), "gpt") < 1e-9


# --- values without gradients between stages


class Choosing(nn.Module):
    """Hands whole numbers, booleans and a float without gradient from the first stage to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        place, seen, other = h.argmax(-1), h > 0.1, h.detach() * 2
        h = self.b(h).tanh() * seen
        y = self.c(h).tanh() + other
        return y * (1 + nn.functional.one_hot(place, 8))


def sum_of_squares(y: Tensor) -> Tensor:
    return (y * y).sum()


def choosing() -> tuple[Choosing, Batch]:
    torch.manual_seed(0)
    return Choosing(), (torch.randn(8, 8, dtype=torch.float64),)


@captured_once()
def trained_choosing(schedule: str, cuts: tuple[str, ...]) -> dict[str, Any]:
    model, batch = choosing()
    prepared = prepared_once(model, (batch[0][:2],), sum_of_squares)
    plan = with_stages(prepared, Pipeline(2, schedule, cuts), 4)
    made = autopar.compile(model, loss_fn=sum_of_squares, plan=plan)
    return train(made, made.step, batch)


@pytest.mark.parametrize(("schedule", "cuts"), [("1f1b", ("tanh",)), ("zbv", ("relu", "tanh", "tanh_1"))])
def test_values_without_gradients_pass_stages(two_ranks: Ranks, schedule: str, cuts: tuple[str, ...]) -> None:
    model, batch = choosing()

    def step(x: Tensor) -> Tensor:
        loss = sum_of_squares(model(x))
        loss.backward()
        return loss

    found = two_ranks.run(trained_choosing, schedule, cuts)
    assert distance_of(found, train(model, step, batch)) < 1e-9


# --- tied parameters


@captured_once()
def train_tied(
    schedule: str, ranks: int, mesh: dict[str, int] | None = None, recipe: str = "auto"
) -> tuple[dict[str, Any], list[str]]:
    model, batch = tied_gpt()
    made = compiled(model, batch, loss_fn, schedule=schedule, ranks=ranks, mesh=mesh, recipe=recipe)
    found = train(made, made.step, batch)
    return found, held(made)


@pytest.mark.parametrize(("schedule", "ranks"), often([("1f1b", 2), ("zbv", 2), ("1f1b", 4)], [("zbv", 2)]))
def test_a_tied_matrix_is_the_same_on_both_of_its_stages(
    two_ranks: Ranks, four_ranks: Ranks, schedule: str, ranks: int
) -> None:
    """Trained with AdamW and clipping, whose norm counts it once."""
    results = (two_ranks if ranks == 2 else four_ranks).run(train_tied, schedule, ranks)
    expected = single_tied()
    holders = [i for i, (_, names) in enumerate(results) if "token_embedding.weight" in names]
    assert holders == ([0] if schedule == "zbv" else [0, ranks - 1])
    assert distance_of([found for found, _ in results], expected) < 1e-9


def test_the_owner_of_a_tied_matrix_is_one_rank_of_each_of_its_stages(four_ranks: Ranks) -> None:
    results = four_ranks.run(train_tied, "1f1b", 2, {"dp": 2}, "parameter-server")
    assert distance_of([found for found, _ in results], single_tied()) < 1e-9


# --- the place of the axis, inputs in parts, results as DTensors


@captured_once()
def inner_axis() -> tuple[dict[str, Any], float, float]:
    """Stages along the second axis, the batch in parts, the result as a DTensor."""
    model, batch = tied_gpt()
    plan = plan_for(model, batch, loss_fn, "1f1b", 2, 4, {"dp": 2}, "zero1")
    assert plan.pipeline is not None
    plan = replace(plan, pipeline=replace(plan.pipeline, position=1))
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan, outputs="dtensor")
    place = dist.get_rank() // 2
    with torch.no_grad():
        whole = made.step(*batch).item()
        part = made.step(*(x.chunk(2)[place] for x in batch)).item()
        result = made(batch[0]).full_tensor()
    error = (result - tied_gpt()[0](batch[0])).abs().max().item()
    return train(made, made.step, batch), abs(whole - part), error


def test_stages_along_the_inner_axis(four_ranks: Ranks) -> None:
    results = four_ranks.run(inner_axis)
    expected = single_tied()
    whole = together([found for found, _, _ in results])
    for found, parts, error in results:
        assert difference({key: (whole | found)[key] for key in expected}, expected) < 1e-9
        assert parts < 1e-12 and error < 1e-12


# --- what is refused


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@captured_once()
def refusals() -> list[str]:
    model, batch, loss = make("gpt")
    made = compiled(model, batch, loss)
    made.step(*batch)
    few, one = make("gpt")[0], make("gpt")[0]
    return [
        message_of(lambda: compiled(few, batch, loss, micro_batches=1).step(*batch)),
        message_of(lambda: autopar.compile(one, loss_fn=loss, plan=made.plan, micro_batches=2)),
        message_of(lambda: autopar.compile(one, loss_fn=loss, plan=made.plan, mesh={"dp": 2})),
    ]


def test_refusals_have_their_numbers(two_ranks: Ranks) -> None:
    few, count, mesh = equal_on_all(two_ranks.run(refusals))
    assert few.startswith("PlanError: The schedule 1f1b takes at least as many micro-batches as")
    assert "The plan has micro_batches=4, and compile was given micro_batches=2" in count
    assert mesh == ("MeshError: The plan was made for the mesh pp=2,dp=1, but the mesh given is dp=2.")
