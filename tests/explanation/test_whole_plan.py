"""A plan that was made of three layers is loaded, and proved, for the model with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import verify
from autopar.cost_model import find_cluster
from autopar.errors import PlanError
from autopar.explanation.advice import Question
from autopar.ir import Plan
from autopar.models import Preset, build, example_inputs, targets
from autopar.models.description import Transformer
from autopar.planning.planning import prepare_step
from autopar.search.request.request import Request

LAYERS = 4
DEEP = Transformer.from_dimensions("gpt", hidden=16, layers=LAYERS, heads=2, ffn=32, vocab=32, max_positions=8)


def asked(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]) -> Question:
    preset = Preset("deep", DEEP, 1e4, "this test")
    monkeypatch.setattr(targets, "PRESETS", {"deep": preset})
    return question_about("deep", mesh)


def question_about(target: str, mesh: dict[str, int]) -> Question:
    request = Request(
        find_cluster("h100").hardware, mesh=mesh, batch=8, micro_batches=2, schedule="1f1b" if "pp" in mesh else None
    )
    return Question(target, request, 8)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_it_passes_the_proof(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = saved_and_loaded(asked(monkeypatch, mesh), tmp_path)
    torch.manual_seed(0)
    model = build(DEEP, dtype=torch.bfloat16)
    batch = tuple(torch.randint(32, x.shape) for x in example_inputs(DEEP, 4, 8))
    prepared = prepare_step(model, batch)
    assert plan.fingerprint == prepared.captured.fingerprint
    assert list(plan.ops) == [op.name for op in prepared.analysis.graph.ops]
    assert list(plan.parameters) == list(prepared.analysis.graph.parameters)
    assert verify(model, batch, mesh=plan.world_mesh, plan=plan).passed


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a small Llama, and a plan that explain made of it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    saved_and_loaded(question_about(str(folder), {"dp": 2}), folder)
    return folder


def llama(folder: Path, *, use_cache: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a configuration, in training mode, and a micro-batch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, use_cache=use_cache)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    tokens = torch.randint(32, (4, 8))
    return model, {"input_ids": tokens, "labels": tokens}


def test_a_configuration_s_passes_it(llama_folder: Path) -> None:
    """Its key heads are fewer than its query heads, for which attention's strides differ between meta and CPU."""
    plan = Plan.load(llama_folder / "plan.json")
    model, batch = llama(llama_folder, use_cache=False)
    assert verify(model, batch, mesh=plan.world_mesh, plan=plan).passed


def test_a_configuration_s_is_refused_for_a_model_with_a_cache(llama_folder: Path) -> None:
    """Such a model does not look for packed sequences, so that its graph is another."""
    plan = Plan.load(llama_folder / "plan.json")
    model, batch = llama(llama_folder, use_cache=True)
    with pytest.raises(PlanError, match=r"set model\.config\.use_cache = False\)\. Make a plan"):
        verify(model, batch, mesh=plan.world_mesh, plan=plan)


def saved_and_loaded(question: Question, folder: Path) -> Plan:
    found = question.answer()
    assert [(s.layers, s.captured) for s in found.graph.stacks] == [(LAYERS, 3)]
    question.whole_plan(found.plan).save(folder / "plan.json")
    return Plan.load(folder / "plan.json")
