"""verify of schedules without a flush: right delays pass, and wrong versions, orders and shares fail."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.analysis.objective import Objective
from autopar.ir import VERSIONED, Pipeline
from autopar.pipeline.weight_stashing import WeightVersions
from autopar.proof.versions import version_seen
from tests.support.tables import often


class Layer(nn.Module):
    """Two linear maps around a tanh, added to what came in."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def verified(schedule: str, mesh: dict[str, int] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    mesh = mesh or {"pp": 2}
    model = nn.Sequential(*(Layer(options.pop("norm", False)) for _ in range(mesh["pp"]))).double()
    asked = {"recipe": schedule, "micro_batches": 4 * mesh["pp"], "loss_fn": square} | options
    return autopar.verify(model, torch.randn(4, 8, dtype=torch.float64), mesh=mesh, **asked)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    often(itertools.product((2, 4), VERSIONED), [*((2, name) for name in VERSIONED), (4, "2bw")]),
)
def test_stages_equal_a_single_device_with_the_same_delays(schedule: str, stages: int) -> None:
    report = verified(schedule, {"pp": stages})
    assert report.passed and report.met is not None and report.steps == 2
    assert report.parameters == len([v for v in report.verdicts if v.kind == "parameter"]) / 2
    assert (
        f"{schedule} with {4 * stages} micro-batches through {stages} stages, against the same delays on one device"
        in str(report)
    )


@pytest.mark.parametrize(
    ("schedule", "mesh", "inside"), [("pipedream", {"pp": 2, "dp": 2}, "ddp"), ("2bw", {"pp": 2, "tp": 2}, "tp")]
)
def test_stages_of_several_ranks(schedule: str, mesh: dict[str, int], inside: str) -> None:
    assert verified(schedule, mesh, recipe={"pp": schedule, [*mesh][1]: inside}).passed


def test_running_statistics_follow_the_micro_batches() -> None:
    report = verified("pipedream", norm=True)
    assert report.passed and report.buffers > 0


def test_recomputed_blocks() -> None:
    found = autopar.explain(
        nn.Sequential(Layer(), Layer()).double(),
        torch.randn(4, 8, dtype=torch.float64),
        mesh={"pp": 2},
        recipe="pipedream-sync",
        micro_batches=4,
        recompute="full",
        loss_fn=square,
    )
    assert verified("pipedream-sync", plan=found.plan).passed


def test_a_model_in_float32() -> None:
    model = nn.Sequential(Layer(), Layer())
    report = autopar.verify(model, torch.randn(4, 8), mesh={"pp": 2}, recipe="2bw", micro_batches=8, loss_fn=square)
    assert report.passed and report.arithmetic == "float32"


class Labelled(nn.Module):
    """Classes of rows, of which some are ignored: the loss is a mean over those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_mean_over_what_counts_is_that_of_an_update(schedule: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 8, dtype=torch.float64), torch.tensor([1, -100, 3, 5])
    model = Labelled().double()
    assert autopar.verify(model, batch, mesh={"pp": 2}, recipe=schedule, micro_batches=4).passed


# --- what is wrong fails


def failures(schedule: str) -> set[str]:
    report = verified(schedule)
    assert not report.passed
    return {v.kind for v in report.failures}


@pytest.mark.parametrize("schedule", VERSIONED)
def test_another_version_fails(schedule: str) -> None:
    newest = property(lambda found: found.newest if schedule != "pipedream" else ((0,) * 8,) * 2)
    with mock.patch.object(WeightVersions, "seen", newest):
        assert {"parameter", "loss"} <= failures(schedule)


def test_shares_of_a_whole_step_fail() -> None:
    with mock.patch.object(Objective, "shares_of_groups", lambda self, shares, size: list(shares)):
        assert "parameter" in failures("pipedream")


def test_a_plan_with_another_schedule_passes_by_its_own_delays() -> None:
    model = nn.Sequential(Layer(), Layer()).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    plan = autopar.explain(model, x, mesh={"pp": 2}, recipe="1f1b", micro_batches=4, loss_fn=square).plan
    for schedule in VERSIONED:
        edited = autopar.Plan.parse(str(plan).replace("pipeline 1f1b", f"pipeline {schedule}"))
        assert edited.pipeline == replace(plan.pipeline, schedule=schedule)
        assert autopar.verify(model, x, mesh={"pp": 2}, plan=edited, loss_fn=square).passed


def test_formulas_are_those_of_the_actions() -> None:
    for schedule in VERSIONED:
        pipeline = Pipeline(4, schedule, ("a", "b", "c"))
        seen = WeightVersions(pipeline, 16).seen
        assert seen == tuple(tuple(version_seen(pipeline, s, m) for m in range(16)) for s in range(4))
