"""Collectives with work beside them start early and are waited for late: text in, text out."""

import pytest
import torch
from torch import fx, nn

from autopar.passes import start_early
from tests.passes.test_running import gather, module_of, text, total

aten = torch.ops.aten


def finish(started):
    """Stands for the function of `autopar.runtime.collectives.async_collectives`."""
    return started


@pytest.fixture
def graph():
    return fx.Graph()


def relu(graph, x):
    return graph.call_function(aten.relu.default, (x,))


def add(graph, x, y):
    return graph.call_function(aten.add.Tensor, (x, y))


def lines(graph, result):
    """The text of the graph with this result, after the pass."""
    graph.output((result,))
    module = module_of(graph)
    start_early(module, lambda call: nn.Identity(), finish)
    module.graph.lint()
    return text(module.graph)


def test_a_collective_travels_while_another_branch_runs(graph):
    x = graph.placeholder("x")
    first = total(graph, relu(graph, x))
    other = relu(graph, x)
    assert lines(graph, add(graph, other, first)) == [
        "relu_default = aten.relu(x,)",
        "start_0 = start_0(relu_default,)",
        "relu_default_1 = aten.relu(x,)",
        "finish = finish(start_0,)",
        "add_tensor = aten.add.Tensor(relu_default_1, finish)",
        "return (add_tensor,)",
    ]


def test_a_collective_starts_behind_its_operand(graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    other = relu(graph, y)
    rows = gather(graph, x)
    assert lines(graph, add(graph, rows, other)) == [
        "start_0 = start_0(x,)",
        "relu_default = aten.relu(y,)",
        "finish = finish(start_0,)",
        "add_tensor = aten.add.Tensor(finish, relu_default)",
        "return (add_tensor,)",
    ]


def test_what_an_earlier_block_made_is_not_gathered_before_its_use(graph):
    """As the skip of a U-Net, whose whole would lie in memory during all blocks in between."""
    x = graph.placeholder("x")
    skip = relu(graph, x)
    skip.meta["block"] = 0
    rows, other = gather(graph, skip), relu(graph, x)
    result = add(graph, rows, other)
    for node in (rows, other, result):
        node.meta["block"] = 5
    assert not any("start" in line for line in lines(graph, result))


def vary(graph, x):
    """Sends nothing; its backward is an all-reduce."""
    return graph.call_function(torch.ops.autopar.vary.default, (x, [], 2, "dp", "all_reduce"))


def test_a_call_that_sends_in_backward_alone_is_split(graph):
    x = graph.placeholder("x")
    operand = vary(graph, relu(graph, x))
    other = relu(graph, x)
    assert sum("start" in line for line in lines(graph, add(graph, other, operand))) == 2


def test_gradients_of_parameters_go_in_buckets_and_not_by_themselves(graph):
    x, w = graph.placeholder("x"), graph.placeholder("w")
    operand, other = vary(graph, w), relu(graph, x)
    assert not any("start" in line for line in lines(graph, add(graph, other, operand)))


def test_a_chain_stays_as_it_is(graph):
    """As under sequence parallelism: views in between hide nothing."""
    x = relu(graph, graph.placeholder("x"))
    rows = gather(graph, x)
    graph.call_function(aten.view.default, (x, [-1]))
    assert lines(graph, total(graph, relu(graph, rows))) == [
        "relu_default = aten.relu(x,)",
        "all_gather_default = autopar.all_gather(relu_default, [0], 2, 'dp', 'reduce_scatter')",
        "view_default = aten.view(relu_default, [-1])",
        "relu_default_1 = aten.relu(all_gather_default,)",
        "all_reduce_default = autopar.all_reduce(relu_default_1, [], 2, 'dp', 'vary')",
        "return (all_reduce_default,)",
    ]
