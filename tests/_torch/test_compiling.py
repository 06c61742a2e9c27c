"""torch.compile: its backends, what AOTAutograd traces, and what Dynamo says of a graph."""

import functools
import logging
import random

import pytest
import torch
from torch import nn

from autopar import _torch

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_backend_compiles_a_graph_for_arguments_like_these(backend):
    graph = torch.fx.symbolic_trace(lambda x, w: (torch.tanh(x) @ w, x.view(-1)))
    x, w = torch.randn(2, 3), torch.randn(4, 3).t().requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        run = _torch.compile_graph(graph, (x, w), backend)
        assert not seen
    y, flat = run(x, w)
    torch.testing.assert_close(y, torch.tanh(x) @ w)
    assert torch.equal(flat, x.view(-1)) and y.requires_grad and not flat.requires_grad
    torch.testing.assert_close(*torch.autograd.grad(y.sum(), w), torch.tanh(x).t().sum(1, keepdim=True).expand(3, 4))


def test_a_missing_compiler_is_told():
    from torch._inductor import config

    with config.patch("cpp.cxx", (None, "no-such-compiler")):  # monkeypatch would delete it at its end
        assert "no-such-compiler" in _torch.missing_cpp_compiler()
    assert "no-such-compiler" not in _torch.missing_cpp_compiler()


def test_complex_numbers_inside_a_graph_are_seen():
    module = torch.fx.symbolic_trace(lambda x: torch.view_as_real(torch.fft.fft(x)))
    assert _torch.computes_complex(module, (torch.ones(4),))
    assert not _torch.computes_complex(torch.fx.symbolic_trace(lambda x: x.tanh()), (torch.ones(4),))


def test_a_second_derivative_is_noticed():
    module, x = torch.fx.symbolic_trace(lambda x: (x.exp(),)), torch.ones(2, requires_grad=True)
    results = _torch.compile_graph(module, (x,), "aot_eager")(x)

    def refuse(*_):
        raise ValueError("a derivative of a gradient")

    _torch.on_second_derivative(results, refuse)
    (gradient,) = torch.autograd.grad(results[0].sum(), x, create_graph=True)
    assert gradient.equal(x.exp())
    with pytest.raises(ValueError, match="a derivative of a gradient"):
        gradient.sum().backward()


def test_aot_autograd_traces_functional_tensors():
    seen = []

    def twice(x):
        seen.append(_torch.is_functional(x))
        return x * 2

    graph = torch.fx.Graph()
    graph.output((graph.call_function(twice, (graph.placeholder("x"),)),))
    module = torch.fx.GraphModule(nn.Module(), graph)
    _torch.compile_graph(module, (torch.ones(2, requires_grad=True),), "aot_eager")
    assert any(seen)
    seen.clear()
    module(torch.ones(2))
    assert seen == [False]


def test_what_torch_compile_gave_has_the_module_inside():
    model = nn.Linear(2, 2)
    assert _torch.uncompiled(torch.compile(model)) is model is _torch.uncompiled(model)


def test_dynamo_says_where_the_arguments_of_a_graph_come_from():
    sources = []

    def backend(graph, _):
        sources.extend(map(_torch.dynamo_source, graph.graph.find_nodes(op="placeholder")))
        return graph

    torch.compile(nn.Sequential(nn.BatchNorm1d(3)).eval(), backend=backend)(X)
    assert any(s.endswith("._modules['0']._parameters['weight']") for s in sources)
    assert any(s.endswith("._modules['0']._buffers['running_mean']") for s in sources)


def test_generators_that_a_frame_draws_from_are_named():
    own, found = random.Random(0), []

    def backend(graph, _):
        found.extend(_torch.own_generators())
        return graph

    def drawn(x):
        return x * own.random()

    def seeded(x):
        own.seed(3)
        return x * own.random()

    def made_inside(x):
        return x * random.Random(0).random()

    torch.compile(made_inside, backend=backend)(X)
    torch.compile(lambda x: 2 * x, backend=backend)(X)
    assert found == []
    # Since 2.15 a draw is of the generator itself at every call; what sets its state is still compiled in.
    torch.compile(drawn if torch.__version__ < "2.15" else seeded, backend=backend)(X)
    assert len(found) == 1 and "own" in found[0]
    assert _torch.own_generators() == []


def test_recurrent_layers_are_traced_by_dynamo():
    graphs = []

    def seen(graph, _):
        graphs.append(graph)
        return graph.forward

    _torch.trace_recurrent_layers()
    torch.compile(torch.nn.LSTM(2, 2), backend=seen)(torch.ones(1, 1, 2))
    assert any("lstm" in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_an_op_that_fails_without_values_is_raised_and_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "filters", [])
    _torch.quiet_fake_failures()
    with pytest.raises(RuntimeError), _torch.fake_mode() as mode:
        mode.from_tensor(torch.ones(2, 3)) @ mode.from_tensor(torch.ones(2, 3))
    assert not caplog.records


def test_dynamo_says_which_code_and_modules_it_has_traced():
    model, found = nn.Sequential(nn.Tanh()), []

    def backend(graph, _):
        found.append((_torch.traced_code(), _torch.traced_modules(graph.graph)))
        return graph.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend)(X)
    code, modules = found[0]
    assert {nn.Sequential.forward.__code__, nn.Tanh.forward.__code__} <= code
    assert modules == {nn.Sequential, nn.Tanh}
    assert not _torch.traced_code()


SCALE = 1.0


@functools.lru_cache
def cached(n, *, by=1):
    return SCALE * n * by


@functools.lru_cache
def cached_tensor(n):
    return torch.arange(n) * SCALE


def test_calls_of_functions_with_a_cache_are_noted_with_constants(monkeypatch):
    _torch.watch_cached_calls()
    found, inputs = [], []

    def backend(graph, _):
        found.append([(x.cached, x.key, x.results) for x in _torch.cached_calls()])
        inputs.append(len(graph.graph.find_nodes(op="placeholder")))
        return graph.forward

    torch.compiler.reset()
    run = torch.compile(lambda x: x * cached(3, by=2) + cached_tensor(3), backend=backend)
    for scale in (1.0, 2.0, 3.0):  # a number that changes would become an input of the graph
        monkeypatch.setitem(globals(), "SCALE", scale)
        run(X)
    assert found == [
        [(cached, ((3,), (("by", 2),)), (6.0 * scale,)), (cached_tensor, ((3,), ()), ())] for scale in (1, 2, 3)
    ]
    assert inputs == [1, 1, 1] and not _torch.cached_calls()
