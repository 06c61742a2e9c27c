"""Passes that make a program fit to run, and two that make a capture fit for analysis: text in, text out."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.capture.export import capture_step
from autopar.ir import Mesh
from autopar.ops.collectives import run_collective
from autopar.passes import call_bindings, clean_up, defer_loss_sum, find_gathers, group_gathers, hoist_input_sums
from autopar.runtime.collectives.hops import Hop
from autopar.runtime.parameters.gather import route_of

aten, autopar_ops = torch.ops.aten, torch.ops.autopar


def text(graph):
    """The calls of a graph and its output, one a line."""
    lines = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_module"):
            target = getattr(node.target, "__name__", str(node.target))
            name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
            lines.append(f"{node.name} = {re.sub(r'[.]default$', '', name)}{tuple(node.args)}")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
    return lines


def gather(graph, x, axis="dp", dim=0):
    return graph.call_function(autopar_ops.all_gather.default, (x, [dim], 2, axis, "reduce_scatter"))


def total(graph, x, axis="dp"):
    return graph.call_function(autopar_ops.all_reduce.default, (x, [], 2, axis, "vary"))


@pytest.fixture
def graph():
    return fx.Graph()


def module_of(graph):
    return fx.GraphModule(nn.Module(), graph)


# --- gathers of parameters


def test_parameters_are_gathered_together_before_their_first_use(graph):
    a, b, x = (graph.placeholder(name) for name in "abx")
    full_a, full_b = gather(graph, a), gather(graph, b)
    y = graph.call_function(aten.linear.default, (x, full_b))
    graph.output((graph.call_function(aten.linear.default, (y, full_a)),))
    module = module_of(graph)
    chains = find_gathers(module, 2)
    assert [chain.parameter for chain in chains] == [1, 0]  # b is used first
    group_gathers(
        module,
        chains,
        key=lambda chain: 0,
        size_bytes=lambda chain: 8,
        make=lambda chains: nn.Identity(),
        bucket_bytes=16,
    )
    assert text(module.graph) == [
        "gather_0 = gather_0(b, a)",
        "getitem = getitem(gather_0, 0)",
        "getitem_1 = getitem(gather_0, 1)",
        "linear_default = aten.linear(x, getitem)",
        "linear_default_1 = aten.linear(linear_default, getitem_1)",
        "return (linear_default_1,)",
    ]


def test_groups_are_closed_when_they_are_full(graph):
    leaves = [graph.placeholder(name) for name in "abc"]
    graph.output(tuple(gather(graph, leaf) for leaf in leaves))
    module = module_of(graph)
    sizes = []
    group_gathers(
        module,
        find_gathers(module, 3),
        key=lambda chain: 0,
        size_bytes=lambda chain: 8,
        make=lambda chains: sizes.append(len(chains)) or nn.Identity(),
        bucket_bytes=16,
    )
    assert sizes == [2, 1]


def test_a_chain_ends_where_its_value_is_used_and_inputs_have_none(graph):
    a, x = graph.placeholder("a"), graph.placeholder("x")
    inner = gather(graph, a, "tp")
    outer = gather(graph, inner, "dp")
    cast = graph.call_function(aten.neg.default, (outer,))
    graph.output((cast, gather(graph, x)))
    (chain,) = find_gathers(module_of(graph), 1)
    assert chain.nodes == (inner, outer)
    mesh = Mesh.of({"dp": 2, "tp": 2})
    assert route_of(chain, (3, 5), mesh) == (
        Hop("all_gather", "reduce_scatter", (0,), 1, 2, (3, 5), (3, 5), (6, 5), (6, 5)),
        Hop("all_gather", "reduce_scatter", (0,), 0, 2, (6, 5), (6, 5), (12, 5), (12, 5)),
    )


# --- sums


def test_the_sum_that_makes_the_loss_is_left_to_the_end(graph):
    x = graph.placeholder("x")
    loss = graph.call_function(aten.sum.default, (x,))
    graph.output((x, total(graph, total(graph, loss, "tp"), "dp")))
    module = module_of(graph)
    assert defer_loss_sum(module) == ("tp", "dp")
    assert text(module.graph) == ["sum_default = aten.sum(x,)", "return (x, sum_default)"]


def test_a_sum_that_others_use_stays(graph):
    x = graph.placeholder("x")
    summed = total(graph, x)
    graph.output((summed, summed))
    assert defer_loss_sum(module_of(graph)) == ()


def start(*args): ...


def finish(*args): ...


def test_sums_of_inputs_are_started_first(graph):
    p, x = graph.placeholder("p"), graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (p, x))
    count = total(graph, graph.call_function(aten.sum.default, (x,)))
    graph.output((graph.call_function(aten.div.Tensor, (total(graph, y), count)),))
    module = module_of(graph)
    hoist_input_sums(module, start, finish, parameters=1)
    assert text(module.graph) == [
        "sum_default = aten.sum(x,)",
        "start = start(sum_default, [], 2, 'dp', 'vary')",
        "mul_tensor = aten.mul.Tensor(p, x)",
        "finish = finish(start,)",
        "all_reduce_default_1 = autopar.all_reduce(mul_tensor, [], 2, 'dp', 'vary')",
        "div_tensor = aten.div.Tensor(all_reduce_default_1, finish)",
        "return (div_tensor,)",
    ]


# --- captures


def captured(model, batch, loss_fn):
    module = capture_step(model, batch, {}, loss_fn).module
    clean_up(module)
    return module


def test_a_loss_is_its_terms_and_their_mean():
    module = captured(nn.Identity(), (torch.ones(4, 2, requires_grad=True), torch.ones(4, 2)), F.mse_loss)
    assert text(module.graph) == [
        "mse_loss = aten.mse_loss(batch_0, batch_1, 0)",
        "mean = aten.mean(mse_loss,)",
        "return (mean,)",
    ]


def test_a_batch_norm_in_evaluation_has_one_result():
    module = captured(nn.BatchNorm1d(2).eval(), (torch.ones(4, 2),), lambda y: y.sum())
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == ["aten.batch_norm.default", "aten.sum.default"]
    assert all(node.target is not operator.getitem for node in calls)


def test_collectives_are_called_without_the_dispatcher(graph):
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.autopar.vary.default, (x, [], 2, "group", "all_reduce")))
    module = module_of(graph)
    call_bindings(module)
    (call,) = (node for node in graph.nodes if node.op == "call_function")
    assert call.target is run_collective and call.args == ("vary", x, [], 2, "group", "all_reduce")
    assert module(torch.ones(4)).tolist() == [1.0] * 4


def test_ops_are_called_by_the_functions_of_python(graph):
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    parts = graph.call_function(aten.split.Tensor, (doubled, 2))
    graph.output(graph.call_function(operator.getitem, (parts, 0)))
    module = module_of(graph)
    call_bindings(module)
    assert text(graph) == [
        "mul_tensor = mul(x, 2)",
        "split_tensor = aten.split.Tensor(mul_tensor, 2)",  # no function of C splits
        "getitem = getitem(split_tensor, 0)",
        "return getitem",
    ]
    assert module(torch.ones(4)).tolist() == [2.0, 2.0]
