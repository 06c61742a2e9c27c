"""Schedules without a flush in a search: by name alone, priced with their versions, and refused where none can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model import find_hardware
from autopar.errors import AutoparError, PlanError, RecipeError
from autopar.explanation.launch import launch
from autopar.ir import VERSIONED
from autopar.ir.note import kind_of
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.schedules import actions
from autopar.search.request.recipes import split_recipe
from autopar.search.request.request import Request
from autopar.search.stages.pipeline_settings import SEARCHED_SCHEDULES
from benchmarks.versions.idle import full_seconds, idle_seconds

WIDTH, ROWS, STAGES = 64, 64, 4
STAGE_BYTES = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)  # two linear maps with biases, in float32


class Layer(nn.Module):
    """Two linear maps around a tanh, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def explained(schedule: str, micro_batches: int = 8, **options: Any) -> Any:
    model = nn.Sequential(*(Layer() for _ in range(STAGES)))
    asked = {"mesh": {"pp": STAGES}, "recipe": schedule, "loss_fn": torch.mean} | options
    return autopar.explain(model, torch.empty(ROWS, WIDTH), micro_batches=micro_batches, **asked)


def sentence(schedule: str) -> str:
    (note,) = (n for n in explained(schedule).plan.notes if kind_of(n) == "versions")
    return str(note)


# --- price


@pytest.mark.parametrize(("schedule", "further"), [("pipedream", 3), ("pipedream-sync", 3), ("2bw", 1)])
def test_memory_counts_versions(schedule: str, further: int) -> None:
    flushed, found = explained("1f1b"), explained(schedule)
    assert found.memory_bytes - flushed.memory_bytes == further * STAGE_BYTES
    assert found.memory.part("weight versions").value == further * STAGE_BYTES


def test_time_has_every_update() -> None:
    # One update less than all of them waits for nobody: 1F1B's one comes after its schedule.
    flushed, found = explained("1f1b"), explained("pipedream")
    once = flushed.time.part("once a step").value
    assert found.time.part("updates").value == pytest.approx(8 * once)
    assert flushed.time.value < found.time.value < flushed.time.value + 8 * STAGES * once


def test_a_full_pipeline_waits_for_nobody() -> None:
    found = explained("pipedream", micro_batches=32)
    step = ExecutedStep(found.graph, found.plan, find_hardware("h100"))
    costs = [replace(step.costs[0], send_forward_seconds=0, send_backward_seconds=0)] * STAGES
    run = autopar.pipeline.simulation.simulate(actions(step.pipeline, 32), costs)
    assert idle_seconds(run, *full_seconds(run)) == pytest.approx([0] * STAGES, abs=1e-12)


# --- what is said


def test_the_plan_says_what_is_no_longer_the_result_of_one_device() -> None:
    assert sentence("pipedream").startswith(
        "Not the result of a single device: under pipedream every stage updates its parameters after each micro-batch, "
        "8 times a step, without waiting for the others; a gradient is up to 3 updates old on stage 0, and 0 "
        "on the last. A step takes about "
    )
    assert "a gradient is up to 3 updates old. A step" in sentence("pipedream-sync")
    assert "after every 4 micro-batches, 2 times a step" in sentence("2bw")
    assert "a gradient is up to 1 update old. A step" in sentence("2bw")
    assert "of which older versions are up to 99.8 kB." in sentence("pipedream")
    assert sentence("2bw") in " ".join(str(explained("2bw")).split())


def test_a_flush_at_every_update_would_take_longer() -> None:
    words = sentence("pipedream").split("takes about ")[1]
    inside, _, flushed = words.partition(" in place of ")
    assert inside.endswith("ms") and float(inside.split()[0]) < 0.5 * float(flushed.split()[0])


def test_what_launches_the_plan_attaches_an_optimizer() -> None:
    line = "model.attach_optimizer(optimizer)"
    assert line in launch(explained("2bw")) and line not in launch(explained("1f1b"))


def test_the_plan_reads_back() -> None:
    plan = explained("2bw").plan
    assert "pipeline 2bw:" in str(plan)
    again = autopar.Plan.parse(str(plan))
    assert again.pipeline == plan.pipeline and again.recipe == "2bw"
    assert autopar.Plan.from_json(plan.to_json()).pipeline == plan.pipeline


# --- by name alone

WITHOUT_COPIES = "ddp, tp, tp+sp, tp+ep, columns, width, ep"  # recipes whose ops use parameters as they are stored


def test_nothing_else_asks_for_one() -> None:
    assert not {*SEARCHED_SCHEDULES} & {*VERSIONED}
    assert explained("auto").plan.pipeline.schedule not in VERSIONED
    assert split_recipe("pp:2bw,dp:ddp") == ("2bw", {"dp": "ddp"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"micro_batches": None}, "give both, such as mesh={'pp': 4}, micro_batches=16"),
        ({"mesh": None, "ranks": 4}, "give both, such as mesh={'pp': 4}, micro_batches=16"),
        ({"precision": "bf16"}, "and precision='bfloat16', which cannot be combined"),
        ({"offload": True}, "and storage on the host, which cannot be combined"),
        ({"mesh": {"pp": 2, "dp": 2}}, f"the recipe of the axis dp is auto. Name one among {WITHOUT_COPIES}"),
        (
            {"mesh": {"pp": 2, "dp": 2}, "recipe": {"pp": "2bw", "dp": "zero1"}},
            f"the recipe of the axis dp is zero1. Name one among {WITHOUT_COPIES}",
        ),
    ],
)
def test_requests_that_cannot_be(options: dict[str, Any], says: str) -> None:
    asked = {"mesh": {"pp": 4}, "recipe": "pipedream", "micro_batches": 8} | options
    if asked["mesh"] is None:
        asked |= {"recipe": "auto", "schedule": "pipedream"}
    with pytest.raises(RecipeError) as caught:
        Request(find_hardware("h100"), **asked)
    assert says in str(caught.value)


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(AutoparError, match="Take 4 micro-batches"):
        explained("pipedream", micro_batches=2)


def test_stages_inside_which_the_batch_is_split() -> None:
    found = explained("pipedream", mesh={"pp": 2, "dp": 2}, recipe={"pp": "pipedream", "dp": "ddp"})
    assert all(how.zero_stage(0) == 0 for how in found.plan.parameters.values())


# --- plans that cannot be run


class Tied(nn.Module):
    """An embedding whose weight is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(16, WIDTH), nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def test_a_parameter_of_two_stages_is_refused() -> None:
    tokens = torch.zeros(8, dtype=torch.long)
    with pytest.raises(PlanError, match=r"Stages 0 and 1 both use the parameter embedding\.weight"):
        autopar.verify(Tied(), tokens, mesh={"pp": 2}, recipe="pipedream", micro_batches=4, loss_fn=torch.mean)


def test_a_plan_whose_parameters_are_gathered_is_refused() -> None:
    model = nn.Sequential(Layer(), Layer())
    asked: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "loss_fn": torch.mean}
    x = torch.empty(8, WIDTH)
    plan = autopar.explain(model, x, recipe={"pp": "1f1b", "dp": "zero1"}, micro_batches=4, **asked).plan
    edited = replace(plan, pipeline=replace(plan.pipeline, schedule="2bw"))
    with pytest.raises(PlanError, match=r"is stored S.*and used as .*, but the schedule 2bw keeps"):
        autopar.verify(model, x, plan=edited, **asked)
