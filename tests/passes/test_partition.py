"""Text in, text out: what one rank runs, for plans that a reader can check by hand."""

import re

import pytest
import torch
from torch import nn

from autopar.analysis.factors import analyze
from autopar.capture.export import capture_step
from autopar.errors import VerifierError
from autopar.ir import Mesh, ParameterPlan, Plan, R, S, V
from autopar.passes import bind_groups, clean_up, retarget_device, verify_graph
from autopar.program.program import build_program

TWO = Mesh.of({"tp": 2})


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


@pytest.fixture
def mlp():
    captured = capture_step(MLP(), (torch.zeros(6, 4),), {}, None)
    clean_up(captured.module)
    return captured, analyze(captured)


def program(model, ops, up, down, inputs=(R,), mesh=TWO):
    captured, analysis = model
    plan = Plan(mesh, captured.fingerprint, "", 1, {"up.weight": up, "down.weight": down}, {"x": inputs}, ops)
    return build_program(captured, analysis, plan)


def text(module):
    """The calls of a graph, one a line."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            name = re.sub(r"\.(default|dim_IntList)$", "", str(node.target))
            lines.append(f"{node.name} = {name}{tuple(node.args)}")
    return lines


def test_megatron_columns_then_rows(mlp):
    # column-split up, row-split down: f in front, g behind, nothing between
    ops = {"linear": ("j",), "relu": ("d0",), "linear_1": ("k",), "sum_1": ("-",)}
    split = program(mlp, ops, ParameterPlan((S(0),), (S(0),)), ParameterPlan((S(1),), (S(1),)))
    assert text(split.module) == [
        "linear = aten.linear(batch_0, p_model_up_weight)",
        "relu = aten.relu(linear,)",
        "linear_1 = aten.linear(relu, p_model_down_weight)",
        "all_reduce = autopar.all_reduce(linear_1, [], 2, 'tp', 'vary')",
        "sum_1 = aten.sum(all_reduce,)",
    ]  # x requires no gradient, so that R -> V needs no all-reduce backward


def test_fully_sharded_data_parallel_gathers_at_each_use(mlp):
    ops = {"linear": ("b0",), "relu": ("d1",), "linear_1": ("b0",), "sum_1": ("d0",)}
    sharded = ParameterPlan((S(0),), (S(0),))
    assert text(program(mlp, ops, sharded, sharded, (S(0),)).module) == [
        "all_gather = autopar.all_gather(p_model_up_weight, [0], 2, 'tp', 'reduce_scatter')",
        "linear = aten.linear(batch_0, all_gather)",
        "relu = aten.relu(linear,)",
        "all_gather_1 = autopar.all_gather(p_model_down_weight, [0], 2, 'tp', 'reduce_scatter')",
        "linear_1 = aten.linear(relu, all_gather_1)",
        "sum_1 = aten.sum(linear_1,)",
        "all_reduce = autopar.all_reduce(sum_1, [], 2, 'tp', 'vary')",
    ]


def test_residents_on_the_host_are_brought_to_the_device_at_each_use(mlp):
    ops = {"linear": ("b0",), "relu": ("d1",), "linear_1": ("b0",), "sum_1": ("d0",)}
    near = ParameterPlan((S(0),), (S(0),), tier="host")
    far = ParameterPlan((S(0),), (S(0),), tier="host", resident_tier="host")
    lines = text(program(mlp, ops, far, near, (S(0),)).module)
    assert lines[0].startswith("to_device = ") and lines[0].endswith("(p_model_up_weight, 'host')")
    assert [line for line in lines if "all_gather" in line and "autopar" in line] == [
        "all_gather = autopar.all_gather(to_device, [0], 2, 'tp', 'reduce_scatter')",
        "all_gather_1 = autopar.all_gather(p_model_down_weight, [0], 2, 'tp', 'reduce_scatter')",
    ]


def test_a_host_resident_that_is_used_as_it_lies_moves_alone(mlp):
    ops = {"linear": ("j",), "relu": ("d0",), "linear_1": ("k",), "sum_1": ("-",)}
    columns, rows = (ParameterPlan((S(d),), (S(d),), "step", "host", "host") for d in (0, 1))
    lines = text(program(mlp, ops, columns, rows).module)
    assert "linear = aten.linear(batch_0, to_device)" in lines
    assert "linear_1 = aten.linear(relu, to_device_1)" in lines


def test_data_parallel_has_no_collective_in_the_graph_but_the_loss(mlp):
    ops = {"linear": ("b0",), "relu": ("d1",), "linear_1": ("b0",), "sum_1": ("d0",)}
    replica = ParameterPlan((R,), (V,))
    collectives = [x for x in text(program(mlp, ops, replica, replica, (S(0),)).module) if "autopar" in x]
    assert collectives == ["all_reduce = autopar.all_reduce(sum_1, [], 2, 'tp', 'vary')"]


def test_one_conversion_serves_all_consumers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            return ((x @ self.w).relu() @ self.w).sum()

    captured = capture_step(Twice(), (torch.zeros(6, 4),), {}, None)
    clean_up(captured.module)
    analysis = analyze(captured)
    ops = {op.name: ("-",) for op in analysis.graph.ops}
    plan = Plan(TWO, captured.fingerprint, "", 1, {"w": ParameterPlan((S(0),), (S(0),))}, {"x": (R,)}, ops)
    gathers = [x for x in text(build_program(captured, analysis, plan).module) if "all_gather" in x]
    assert sum("autopar" in line for line in gathers) == 1
    assert sum("matmul" in line for line in gathers) == 2


def test_retarget_and_bind(mlp):
    ops = {"linear": ("j",), "relu": ("d0",), "linear_1": ("k",), "sum_1": ("-",)}
    module = program(mlp, ops, ParameterPlan((S(0),), (S(0),)), ParameterPlan((S(1),), (S(1),))).module
    bind_groups(module, {"tp": "group 7"})
    retarget_device(module, torch.device("meta"))
    assert "all_reduce = autopar.all_reduce(linear_1, [], 2, 'group 7', 'vary')" in text(module)


def test_clean_up_drops_assertions_and_reshapes_views():
    class Model(nn.Module):
        def forward(self, x):
            return x.to(torch.float64).view(-1).sum()

    captured = capture_step(Model(), (torch.zeros(2, 3),), {}, None)
    clean_up(captured.module)
    assert [line.split(" = ")[1].split("(")[0] for line in text(captured.module)] == [
        "aten._to_copy",
        "aten.reshape",
        "aten.sum",
    ]


def test_the_verifier_names_node_invariant_and_neighbourhood(mlp):
    ops = {"linear": ("j",), "relu": ("d0",), "linear_1": ("k",), "sum_1": ("-",)}
    module = program(mlp, ops, ParameterPlan((S(0),), (S(0),)), ParameterPlan((S(1),), (S(1),))).module
    node = next(n for n in module.graph.nodes if n.name == "all_reduce")
    node.args = (*node.args[:4], "shard")
    with pytest.raises(VerifierError) as error:
        verify_graph(module, after="sabotage")
    message = str(error.value)
    assert "After sabotage, node all_reduce: shard is not the transpose of any all_reduce." in message
    assert "linear_1" in message and "sum" in message


def test_the_verifier_wants_arguments_before_uses(mlp):
    captured, _ = mlp
    nodes = {n.name: n for n in captured.module.graph.nodes}
    nodes["relu"].append(nodes["linear"])
    with pytest.raises(VerifierError, match="node relu: its argument linear is not defined before it"):
        verify_graph(captured.module, after="sabotage")
