"""The same request gives the same plan, whichever door it comes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def by_explain(request: Request) -> Plan:
    question = Question(TARGET, request)
    return question.whole_plan(question.answer().plan)


def by_compile(request: Request, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """What `autopar.compile` runs, planned for ranks that do not exist."""
    monkeypatch.setattr("autopar.api.planner.world_size", lambda: request.ranks)
    model, args, _, loss_fn = resolve_target(TARGET).build(None)
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
