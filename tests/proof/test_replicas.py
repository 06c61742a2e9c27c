"""verify of plans with replicas: right meetings pass, wrong ones fail, and so do wrong programs."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.ir import Meeting
from autopar.runtime.outer_step import OuterStep


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def model_and_rows(rows: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    return model, torch.randn(rows, 8, dtype=torch.float64)


def verified(recipe: Any, mesh: dict[str, int] | None = None, **options: Any) -> Any:
    model, x = model_and_rows()
    return autopar.verify(
        model, x, mesh=mesh or {"dp": 2}, recipe=recipe, loss_fn=square, **options
    )


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("local:2", {"dp": 4}),
        ("geo:2", {"dp": 2}),
        ({"far": "diloco:10", "dp": "zero3"}, {"far": 2, "dp": 2}),
        ({"dp": "diloco:1", "tp": "tp"}, {"dp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_replicas_equal_plain_ones(recipe: Any, mesh: dict[str, int]) -> None:
    report = verified(recipe, mesh)
    assert report.passed and report.met is not None
    assert report.mesh == autopar.Mesh.of(mesh)


def test_the_report_says_how_replicas_met() -> None:
    text = str(verified("local:10", micro_batches=2))
    assert "2 replicas that meet every 10 steps local, 3 of them run" in text
    assert "updated    " in text and "7 steps" in text


def test_statistics_are_met_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    report = autopar.verify(model, x, mesh={"dp": 2}, recipe="local:2", loss_fn=square)
    assert report.passed and report.buffers == 3


def _forgets_the_base(self: OuterStep, name: str, x: Tensor, mean: Tensor) -> None:
    x.copy_(mean)


def _without_nesterov(self: OuterStep, name: str, base: Tensor, gradient: Tensor) -> None:
    base.add_(gradient, alpha=-self.meeting.rate)


@pytest.mark.parametrize(
    ("recipe", "method", "wrong"),
    [("geo:2", "take", _forgets_the_base), ("diloco:2", "_descend", _without_nesterov)],
)
def test_a_wrong_meeting_fails(recipe: str, method: str, wrong: Any) -> None:
    with mock.patch.object(OuterStep, method, wrong):
        report = verified(recipe)
    assert not report.passed and "parameter" in {v.kind for v in report.failures}


def test_a_plan_from_explain_is_verified() -> None:
    model, x = model_and_rows()
    plan = autopar.explain(model, x, mesh={"dp": 2}, recipe="geo:3", loss_fn=square).plan
    edited = dataclasses.replace(plan, meeting=Meeting("dp", 2, 2, "diloco", 0.5, 0.9))
    for each in (plan, edited, autopar.Plan.parse(str(edited))):
        assert autopar.verify(model, x, mesh={"dp": 2}, plan=each, loss_fn=square).passed
    with pytest.raises(PlanError):
        autopar.verify(model, x[:4], mesh={"dp": 2}, plan=plan, loss_fn=square)
