"""Micro-batches that take turns: text in, text out; and the order in which they do."""

import pytest
import torch
from torch import fx

from autopar.ops.collectives import Collective
from autopar.passes import overlap_batches
from tests.passes.test_running import gather, module_of, text, total

aten = torch.ops.aten


@pytest.fixture
def graph():
    return fx.Graph()


def relu(graph, x):
    return graph.call_function(aten.relu.default, (x,))


def mul(graph, x, y):
    return graph.call_function(aten.mul.Tensor, (x, y))


def one_each(node):
    """Every op computes for a second, and every collective travels for one."""
    return 1.0


def lines(graph, result, copies=2, seconds=one_each):
    """The text of the graph with this result, for several micro-batches of its last placeholder."""
    graph.output((result,))
    module = module_of(graph)
    overlap_batches(module, copies=copies, inputs=1, seconds=seconds)
    module.graph.lint()
    return text(module.graph)


def test_one_computes_while_the_collective_of_the_other_travels(graph):
    x = graph.placeholder("x")
    assert lines(graph, relu(graph, total(graph, relu(graph, x)))) == [
        "relu_default = aten.relu(x,)",
        "all_reduce_default = autopar.all_reduce(relu_default, [], 2, 'dp', 'vary')",
        "relu_default_1 = aten.relu(x_1,)",
        "all_reduce_default_1 = autopar.all_reduce(relu_default_1, [], 2, 'dp', 'vary')",
        "relu_default_2 = aten.relu(all_reduce_default,)",
        "relu_default_3 = aten.relu(all_reduce_default_1,)",
        "return (relu_default_2, relu_default_3)",
    ]


def test_what_depends_on_parameters_alone_is_computed_once(graph):
    w, x = graph.placeholder("w"), graph.placeholder("x")
    assert lines(graph, mul(graph, x, gather(graph, w))) == [
        "all_gather_default = autopar.all_gather(w, [0], 2, 'dp', 'reduce_scatter')",
        "mul_tensor = aten.mul.Tensor(x, all_gather_default)",
        "mul_tensor_1 = aten.mul.Tensor(x_1, all_gather_default)",
        "return (mul_tensor, mul_tensor_1)",
    ]


def test_a_draw_is_made_for_each(graph):
    x = graph.placeholder("x")
    drawn = graph.call_function(aten.rand.default, ([4],))
    found = lines(graph, mul(graph, x, drawn))
    assert sum("aten.rand" in line for line in found) == 2


def test_the_other_runs_on_while_a_message_is_under_way(graph):
    """A short op before a message, long ones after it: the long ops of one cover the messages of the other."""
    x = graph.placeholder("x")
    for _ in range(3):
        x = total(graph, relu(graph, x))  # short
        x = mul(graph, x, x)  # long
        x = gather(graph, mul(graph, x, x))
    seconds = {"relu": 0.0, "mul": 1.0, "all_reduce": 1.0, "all_gather": 1.0}

    def duration(node):
        return seconds[node.target.name().split("::")[1].split(".")[0]]

    graph.output((x,))
    module = module_of(graph)
    overlap_batches(module, copies=2, inputs=1, seconds=duration)
    compute = messages = 2 * 3 * 2.0
    first, last = 1.0, 2.0  # there is nothing beside the first message, and the last one of each
    assert makespan(module.graph, duration) <= max(compute, messages) + first + last


def makespan(graph, duration):
    """Seconds until every op and message is done, where a message is waited for by what reads it."""
    now = link = 0.0
    arrival = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        ready = max((arrival.get(x, 0.0) for x in node.all_input_nodes), default=0.0)
        if Collective.of(node) is None:
            now = max(now, ready) + duration(node)
        else:
            link = arrival[node] = max(link, now, ready) + duration(node)
    return max(now, link)


@pytest.mark.parametrize("copies", [2, 3])
def test_results_are_those_of_each_alone(graph, copies):
    w, x = graph.placeholder("w"), graph.placeholder("x")
    graph.output((mul(graph, w, relu(graph, x)), relu(graph, w)))
    alone, together = module_of(graph), fx.GraphModule(torch.nn.Module(), fx.Graph())
    together.graph.output(together.graph.graph_copy(graph, {}))
    overlap_batches(together, copies=copies, inputs=1, seconds=one_each)
    draw = torch.Generator().manual_seed(0)
    weight, *batches = (torch.randn(4, generator=draw) for _ in range(copies + 1))
    found = together(weight, *batches)
    expected = [y for batch in batches for y in alone(weight, batch)]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
