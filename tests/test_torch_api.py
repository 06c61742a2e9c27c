"""Each torch API without a stability promise that autopar uses, alone: what breaks here broke in torch."""

import contextlib
import logging.handlers
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from autopar import _torch
from autopar.ops.collectives import group_name


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A Gloo group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def parameter(group):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    return nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))


X = torch.arange(6.0).reshape(2, 3)


def test_a_group_is_found_by_its_name(group):
    assert _torch.resolve_group(group_name(group)).rank() == 0


def test_the_timeout_of_a_group_is_set(group):
    _torch.set_group_timeout(group, 7.0)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7.0


def test_functional_collectives_of_one_rank_return_their_input(group):
    name = group_name(group)
    assert torch.equal(_torch.all_reduce(X, name), X)
    assert torch.equal(_torch.all_gather(X, 1, name), X)
    assert torch.equal(_torch.reduce_scatter(X, 1, name), X)
    assert torch.equal(_torch.all_to_all(X, 1, name), X)


def test_started_collectives_leave_their_result(group):
    x, result = X.flatten().clone(), torch.zeros(6)
    _torch.start_all_reduce(x, group).wait()
    assert torch.equal(x, X.flatten())
    _torch.start_all_gather(result, x, group).wait()
    assert torch.equal(result, x)
    result.zero_()
    _torch.start_reduce_scatter(result, x, group).wait()
    assert torch.equal(result, x)


def test_the_local_tensor_is_the_storage_of_the_dtensor(parameter):
    _torch.local_tensor(parameter).add_(1)
    assert parameter.full_tensor().tolist() == [1, 2, 3, 4]


def test_a_dtensor_over_a_meta_shard(parameter):
    made = _torch.dtensor(
        torch.empty(4, 3, device="meta"), parameter.device_mesh, [Replicate()], (4, 3)
    )
    assert isinstance(made, DTensor) and made.shape == (4, 3) and made.is_meta


def test_a_differentiable_local_leaves_a_dtensor_gradient(parameter):
    _torch.differentiable_local(parameter).pow(2).sum().backward()
    assert parameter.grad.placements == (Shard(0),)
    assert parameter.grad.full_tensor().tolist() == [0, 2, 4, 6]


def test_gradients_accumulate(parameter):
    _torch.accumulate_gradient(parameter, torch.ones(4))
    _torch.accumulate_gradient(parameter, torch.ones(4))
    assert parameter.grad.full_tensor().tolist() == [2, 2, 2, 2]


def test_custom_functions_are_seen():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    with _torch.custom_functions() as seen:
        Twice.apply(torch.ones(1))
    assert [name.split(".")[-1] for name in seen] == ["Twice"]
    Twice.apply(torch.ones(1))
    assert len(seen) == 1


def test_a_tensor_without_memory_has_a_shape():
    x = _torch.without_memory((3, 4), torch.float64, torch.device("cpu"))
    assert x.shape == (3, 4) and x.stride() == (4, 1) and x.untyped_storage().nbytes() == 0
    with _torch.fake_mode() as mode:
        assert (mode.from_tensor(x) @ torch.ones(4, 2, dtype=torch.float64)).shape == (3, 2)


def test_what_is_mapped_over_has_no_storage():
    found = []
    torch.func.vmap(lambda x: found.append(_torch.has_storage(x)) or x)(torch.ones(2))
    assert found == [False] and _torch.has_storage(torch.ones(2))


def test_a_storage_reference_knows_views_of_one_storage():
    x = torch.zeros(4)
    assert _torch.storage_reference(x).cdata == _torch.storage_reference(x[1:]).cdata


def test_below_autograd_an_op_records_nothing(group):
    x = torch.ones(2, requires_grad=True)
    call = (x, [], 1, group_name(group), "vary")
    assert _torch.autopar_op("all_reduce")(*call).requires_grad
    with _torch.below_autograd():
        assert not _torch.autopar_op("all_reduce")(*call).requires_grad


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
    torch.testing.assert_close(
        *torch.autograd.grad(y.sum(), w), torch.tanh(x).t().sum(1, keepdim=True).expand(3, 4)
    )


def test_a_missing_compiler_is_told(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    assert "no-such-compiler" in _torch.missing_cpp_compiler()


def test_complex_numbers_inside_a_graph_are_seen():
    module = torch.fx.symbolic_trace(lambda x: torch.view_as_real(torch.fft.fft(x)))
    assert _torch.computes_complex(module, (torch.ones(4),))
    assert not _torch.computes_complex(
        torch.fx.symbolic_trace(lambda x: x.tanh()), (torch.ones(4),)
    )


def test_a_second_derivative_is_noticed():
    module, x = torch.fx.symbolic_trace(lambda x: (x.exp(),)), torch.ones(2, requires_grad=True)
    run, seen = _torch.compile_graph(module, (x,), "aot_eager"), []
    results = run(x)
    _torch.on_second_derivative(results, lambda *_: seen.append(1))
    (gradient,) = torch.autograd.grad(results[0].sum(), x, create_graph=True)
    assert not seen
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
    assert seen


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


def test_the_line_of_an_error_is_the_users():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        assert "torch.ones(2) @ torch.ones(3)" in _torch.user_line(error)


class _RecordedStage(_torch._StandInStage):
    """A stand-in for the schedules of several stages a rank, which split backwards and pass on V's foot."""

    def __init__(self, log, *place):
        super().__init__(*place)
        self.log = log

    def backward_one_chunk(self, micro_batch, *, full_backward, **_):
        self._note("B" if full_backward else "I", micro_batch)

    def backward_weight_one_chunk(self, micro_batch, **_):
        self._note("W", micro_batch)

    def set_local_fwd_input(self, output, micro_batch):
        pass

    def set_local_bwd_input(self, gradient, micro_batch):
        pass

    def get_local_bwd_output(self, micro_batch):
        pass


@pytest.mark.parametrize(
    ("name", "stages_of"),
    [
        ("ScheduleInterleaved1F1B", [(0, 2), (1, 3)]),
        ("ScheduleLoopedBFS", [(0, 2), (1, 3)]),
        ("ScheduleInterleavedZeroBubble", [(0, 2), (1, 3)]),
        ("ScheduleZBVZeroBubble", [(0, 3), (1, 2)]),
        ("ScheduleDualPipeV", [(0, 3), (1, 2)]),
    ],
)
def test_the_actions_of_a_schedule_are_those_that_it_runs(name, stages_of):
    schedule = getattr(pipelining, name)
    for rank, expected in enumerate(_torch.pipeline_actions(schedule, stages_of, 4)):
        log = []
        built = schedule([_RecordedStage(log, index, 4, rank, 2) for index in stages_of[rank]], 4)
        built._stages_forward_initialized = True
        built._step_microbatches()
        assert tuple(log) == expected


def test_the_actions_of_a_loop_are_those_that_it_tells_of_itself_but_for_the_last_rank():
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        told = schedule(_torch._StandInStage(0, 3, 0, 3), 4).pipeline_order
        for rank, found in enumerate(_torch.pipeline_actions(schedule, [(0,), (1,), (2,)], 4)):
            computed = [each for each in found if each[0] in ("F", "B")]
            if rank < 2 or schedule is pipelining.ScheduleGPipe:
                assert computed == list(_torch._flat_actions(told[rank]))
            # Of 1F1B's last rank it tells 1F, 0B, 2F, 1B, ..., a micro-batch that there is not.
            assert sorted(n for kind, _, n in computed if kind == "F") == [0, 1, 2, 3]


def test_a_node_of_autograd_runs_alone():
    x, row = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    hit = []
    row.register_hook(hit.append)
    node = (x.float() + row).grad_fn
    (first, gradient), (second, summed) = _torch.run_node(node, [X])
    assert first.node is get_gradient_edge(x).node and torch.equal(gradient, X)
    assert second.node is get_gradient_edge(row).node and torch.equal(summed, X.sum(0))
    assert hit == [] and not gradient.requires_grad


def test_a_node_of_a_function_written_in_python_runs_alone():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, x, y):
            return x * number, y * number

        @staticmethod
        def backward(ctx, a, b):
            return None, a * 2, b * 3

    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    node = Both.apply(2, x, y)[0].grad_fn
    assert [g.sum() for _, g in _torch.run_node(node, [X, None])] == [30, 0]
    node = Both.apply(2, x.detach(), y)[1].grad_fn
    ((edge, gradient),) = _torch.run_node(node, [None, X])
    assert edge.node is get_gradient_edge(y).node and torch.equal(gradient, 3 * X)


def test_calls_on_fake_tensors_compute_shapes_alone_and_keep_aliases():
    x = torch.ones(2, 3)
    with _torch.fake_mode() as mode:
        fake, view = mode.from_tensor(x), mode.from_tensor(x[1:])
        before = fake._version
        result = (fake @ fake.T).add_(1)
        fake.mul_(2)
    assert result.shape == (2, 2) and fake._version == before + 1
    assert torch.equal(x, torch.ones(2, 3))
    assert _torch.storage_reference(fake).cdata == _torch.storage_reference(view).cdata


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


def test_operators_say_how_many_arguments_they_must_be_given():
    found = [_torch.required_arguments(name) for name in ("mean", "mse_loss", "no_such_operator")]
    assert found == [1, 2, None]


def test_the_store_of_the_default_group_is_found(group):
    _torch.default_store().set("key", "value")
    assert _torch.default_store().get("key") == b"value"
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=7))
    assert _torch.store_seconds(store) == 7


def test_plain_tensors_may_be_taken_for_replicated_ones():
    with implicit_replication():
        assert _torch.replicates_implicitly()
    assert not _torch.replicates_implicitly()


def test_an_op_that_has_to_read_values_says_so_of_a_fake_tensor():
    with FakeTensorMode(), pytest.raises(_torch.DependsOnValues):
        torch.equal(torch.zeros(2), torch.zeros(2))


def test_code_runs_as_if_it_were_compiled():
    with _torch.as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_call_with_swaps_what_has_two_names_and_swaps_it_back():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = torch.nn.Linear(2, 2)
            self.third = torch.nn.Linear(2, 2)
            self.third.weight = self.first.weight

        def forward(self, x):
            return self.third(self.second(self.first(x)))

    model, x = Twice(), torch.ones(1, 2)
    own = [id(p) for p in model.parameters()]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not _torch.call_with(model, zeros, (x,), {}).any()
    assert [id(p) for p in model.parameters()] == own
    assert model.third.weight is model.first.weight


def test_an_op_whose_size_depends_on_values_says_so_of_a_fake_tensor():
    with FakeTensorMode(), pytest.raises(_torch.SizeDependsOnValues):
        torch.zeros(2).nonzero()


def test_torchs_own_checks_of_values_are_off_inside_and_on_again():
    normal, mask = torch.distributions.Normal, torch.nn.Transformer.generate_square_subsequent_mask
    normal.set_default_validate_args(True)  # torch.compile has it off for the rest of a process
    with _torch.without_value_checks():
        assert torch.isnan(normal(0.0, -1.0).log_prob(torch.zeros(())))
        assert not torch.nn.modules.transformer._detect_is_causal_mask(mask(3))
        assert torch.nn.modules.transformer._detect_is_causal_mask(mask(3), is_causal=True)
        with pytest.raises(ValueError, match="invalid values") as explicit:
            normal(0.0, -1.0, validate_args=True)
    with pytest.raises(ValueError, match="invalid values"):
        normal(0.0, -1.0)
    assert torch.nn.modules.transformer._detect_is_causal_mask(mask(3))
    assert _torch.validates_distribution(explicit.value)
    assert not _torch.validates_distribution(ValueError())


def test_a_failing_export_prints_nothing(capfd):
    class Branching(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    class Unlike(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, x[None]])

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler := logging.handlers.BufferingHandler(100))
    for model, said in ((Branching(), "data-dependent"), (Unlike(), "of tensors must match")):
        for quiet in (True, False):
            telling = _torch.quiet_export() if quiet else contextlib.nullcontext()
            with telling, pytest.raises(RuntimeError, match=said):
                torch.export.export(model, (torch.ones(2),), strict=False)
            assert bool(capfd.readouterr().err or handler.buffer) != quiet, model
            handler.buffer.clear()
    log.removeHandler(handler)


def test_recurrent_layers_are_traced_by_dynamo():
    graphs = []

    def seen(graph, _):
        graphs.append(graph)
        return graph.forward

    _torch.trace_recurrent_layers()
    torch.compile(torch.nn.LSTM(2, 2), backend=seen)(torch.ones(1, 1, 2))
    assert any("lstm" in str(node.target) for graph in graphs for node in graph.graph.nodes)
