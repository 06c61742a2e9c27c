"""Every preset at three layers, on the meta device: it captures, and tensor parallelism is found."""

import functools
import itertools

import pytest
import torch

from autopar.analysis.skew import EXPERTS
from autopar.cost_model import find_hardware
from autopar.models import PRESETS, build, example_inputs, parameter_count
from autopar.models.targets import resolve_target
from autopar.planning.planning import make_plan, prepare_step
from autopar.program.program import build_program
from autopar.search.request.request import Request
from tests.support.tables import often

MESH = {"dp": 2, "tp": 2}
UNBOUNDED = 10**15  # bytes: what is tested is the split, not the fit

# An expert's weight splits by experts, and GPT-2 XL's 25 heads do not halve.
COLUMNS = ("query.weight", "key.weight", "value.weight")
WITHOUT_HEADS = ("gpt2-xl",)
# Larger sizes of an architecture that others stand for.
LARGER = {"gpt2-xl", "gpt3-175b", "llama3-70b", "llama3-405b", "gpt-oss-120b", "deepseek-v3"}
NAMES = often(PRESETS, PRESETS.keys() - LARGER)


@functools.cache
def prepared(name):
    description = PRESETS[name].description
    with torch.device("meta"):
        model = build(description, layers=3)
    return prepare_step(model, example_inputs(description, 4))


@pytest.mark.parametrize("name", NAMES)
def test_every_op_but_arange_has_a_rule(name):
    graph = prepared(name).analysis.graph
    assert {op.kind for op in graph.ops if not op.has_rule} <= {"aten.arange"}


RECIPES = "dp:ddp,tp:tp", "dp:zero3,tp:tp+sp"


@pytest.mark.parametrize(
    ("name", "recipe"),
    often(
        itertools.product(PRESETS, RECIPES),
        {("gpt2", RECIPES[0]), *((name, RECIPES[1]) for name in PRESETS.keys() - LARGER)},
    ),
)
def test_heads_and_ffn_are_split_along_tp(name, recipe):
    plan = make_plan(prepared(name), Request(find_hardware("h100"), mesh=MESH, recipe=recipe, memory_bytes=UNBOUNDED))
    on_tp = {name: how.storage[1] for name, how in plan.parameters.items()}
    columns = [n for n in on_tp if n.endswith(COLUMNS) and name not in WITHOUT_HEADS]
    columns += [n for n in on_tp if n.endswith(("mlp.up.weight", "mlp.gate.weight"))]
    rows = [n for n in on_tp if n.endswith(("mlp.down.weight", "mlp.down"))]
    assert len(columns) >= 3
    assert {str(on_tp[n]) for n in columns} == {"S(0)"}
    assert {str(on_tp[n]) for n in rows} <= {"S(1)"}
    of_experts = [n for n in on_tp if n.endswith(("mlp.up", "mlp.gate"))]  # experts, hidden, ffn
    assert {str(on_tp[n]) for n in of_experts} <= {"S(2)"}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_experts_are_one_op_that_costs_what_the_tokens_visit(name):
    d = PRESETS[name].description
    (layer,) = (op for op in prepared(name).analysis.graph.ops if op.kind == EXPERTS and op.module == "layers.1.mlp")
    tokens = 4 * d.max_positions
    assert layer.flops == 3 * 2 * d.experts_per_token * tokens * d.hidden * d.ffn  # three products for each


def test_products_cost_two_flops_a_parameter_and_token():
    graph = prepared("llama3-8b").analysis.graph
    d = PRESETS["llama3-8b"].description
    found = sum(op.flops for op in graph.ops if op.kind == "aten.linear")
    block = d.block_parameters - 2 * d.norm_parameters
    assert found == 2 * 4 * d.max_positions * (3 * block + d.vocab * d.hidden)


def test_what_is_captured_grows_not_with_depth():
    graphs = {}
    for name in ("llama3-8b", "llama3-405b"):
        target = resolve_target(name)
        model, args, kwargs, _ = target.build_few()
        graphs[target.stacks[0].layers] = prepare_step(model, args, kwargs).analysis.graph
    assert len(graphs[32].ops) == len(graphs[126].ops)
    assert parameter_count(PRESETS["llama3-405b"].description) > 4e11


def test_search_finds_expert_parallelism():
    """Tokens are split by batch, experts by expert, and rows change hands twice in every layer."""
    description = PRESETS["mixtral-8x7b"].description
    with torch.device("meta"):
        model = build(description, layers=3)
    step = prepare_step(model, example_inputs(description, 16, 4096))
    plan = make_plan(step, Request(find_hardware("h100"), mesh={"x": 8}, memory_bytes=60 * 10**9))
    experts = [f"layers.{i}.mlp.{name}" for i in range(3) for name in ("gate", "up", "down")]
    assert {str(plan.parameters[name].storage[0]) for name in experts} == {"S(0)"}
    attention = plan.parameters["layers.1.attention.query.weight"].resident[0]
    assert attention.kind in "RV", "attention computes with whole weights"
    program = build_program(step.captured, step.analysis, plan)
    targets = [str(n.target) for n in program.module.graph.nodes]
    assert [sum(name in target for target in targets) for name in ("dispatch", "combine")] == [3, 3]
