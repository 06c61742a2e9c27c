"""A plan that was made of three layers is loaded, and proved, for the model with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar import verify
from autopar.cost_model import find_cluster
from autopar.explanation.advice import Question
from autopar.ir import Plan
from autopar.models import Preset, build, example_inputs, targets
from autopar.models.description import Transformer
from autopar.planning.planning import prepare_step
from autopar.search.request import Request

LAYERS = 4
DEEP = Transformer.from_dimensions(
    "gpt", hidden=16, layers=LAYERS, heads=2, ffn=32, vocab=32, max_positions=8
)


def asked(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> Question:
    preset = Preset("deep", DEEP, 1e4, "this test")
    monkeypatch.setattr(targets, "PRESETS", {"deep": preset})
    request = Request(
        find_cluster("h100").hardware, mesh=mesh, batch=8, micro_batches=2,
        schedule="1f1b" if "pp" in mesh else None,
    )  # fmt: skip
    return Question("deep", request, 8)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_it_passes_the_proof(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    question = asked(monkeypatch, mesh)
    found = question.answer()
    assert [(s.layers, s.captured) for s in found.graph.stacks] == [(LAYERS, 3)]
    question.whole_plan(found.plan).save(tmp_path / "plan.json")

    plan = Plan.load(tmp_path / "plan.json")
    torch.manual_seed(0)
    model = build(DEEP, dtype=torch.bfloat16)
    batch = tuple(torch.randint(32, x.shape) for x in example_inputs(DEEP, 4, 8))
    prepared = prepare_step(model, batch)
    assert plan.fingerprint == prepared.captured.fingerprint
    assert list(plan.ops) == [op.name for op in prepared.analysis.graph.ops]
    assert list(plan.parameters) == list(prepared.analysis.graph.parameters)
    assert verify(model, batch, mesh=plan.world_mesh, plan=plan).passed
