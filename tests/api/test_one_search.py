"""The same request gives the same plan, whichever door it comes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.planner import Planner
from autopar.cost_model import find_hardware
from autopar.explanation.advice import Question
from autopar.ir import Plan
from autopar.models.targets import resolve_target
from autopar.planning.planning import prepare_step
from autopar.search.request import Request

TARGET = "examples.gpt:tiny_example"


def asked(options: dict[str, Any]) -> Request:
    return Request(find_hardware("h100"), **options)


class Long(nn.Module):
    """Few parameters, and activations of many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.head = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.map(x).sigmoid()), y)


def long(batch: int = 16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Long(), (torch.zeros(batch, 1024, 16), torch.zeros(batch, 1024, 1))


def by_explain(request: Request, target: str = TARGET) -> Plan:
    question = Question(target, request)
    return question.whole_plan(question.answer().plan)


def by_compile(request: Request, monkeypatch: pytest.MonkeyPatch, target: str = TARGET) -> Plan:
    """What `autopar.compile` runs, planned for ranks that do not exist."""
    monkeypatch.setattr("autopar.api.planner.world_size", lambda: request.ranks)
    model, args, _, loss_fn = resolve_target(target).build(None)
    planner = Planner(
        request, loss_fn=loss_fn, plan=None, device=torch.device("cpu"), device_mesh=None,
        timeout_seconds=None,
    )  # fmt: skip
    prepared = prepare_step(model, args, loss_fn=loss_fn)
    count = request.micro_batches
    return planner._chosen(prepared, count, None, True)


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4, "stages": (1,)},
        {"ranks": 4, "recipe": "zero3"},
        {"mesh": {"dp": 2, "tp": 2}},
        {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b"},
    ],
)
def test_explain_and_compile_give_the_same_plan(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    explained = by_explain(asked(options))
    compiled = by_compile(asked(options), monkeypatch)
    assert explained.world_mesh == compiled.world_mesh
    assert explained.pipeline == compiled.pipeline
    assert explained.micro_batches == compiled.micro_batches
    assert explained.recompute == compiled.recompute
    assert dict(explained.ops) == dict(compiled.ops)
    assert dict(explained.parameters) == dict(compiled.parameters)
    assert dict(explained.inputs) == dict(compiled.inputs)


def test_all_doors_cut_a_batch_that_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{__name__}:long"
    options: dict[str, Any] = {"mesh": {"dp": 2}, "recipe": "ddp", "recompute": "none", "batch": 16}
    halves = Question(target, asked({**options, "micro_batches": 2})).answer()
    del options["batch"]  # the target's own
    options["memory_bytes"] = int(halves.memory_bytes)
    named = autopar.explain(*long(), cluster="h100x2", headroom=0.0, **options)
    plans = [
        by_explain(asked({**options, "batch": 16}), target),
        by_compile(asked(options), monkeypatch, target),
        named.plan,
    ]
    assert [plan.micro_batches for plan in plans] == [2, 2, 2]
    with pytest.raises(autopar.SearchError):
        autopar.explain(*long(), cluster="h100x2", headroom=0.0, micro_batches=1, **options)
