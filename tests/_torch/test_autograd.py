"""Autograd, node by node and below."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopar import _torch

X = torch.arange(6.0).reshape(2, 3)


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
    results = Both.apply(2, x, y)  # under torch 2.11 its node lives no longer
    node = results[0].grad_fn
    assert [g.sum() for _, g in _torch.run_node(node, [X, None])] == [30, 0]
    results = Both.apply(2, x.detach(), y)
    node = results[1].grad_fn
    ((edge, gradient),) = _torch.run_node(node, [None, X])
    assert edge.node is get_gradient_edge(y).node and torch.equal(gradient, 3 * X)


def test_backward_hooks_of_parameters_and_modules_are_seen():
    for register in (
        lambda m: m.weight.register_hook(lambda g: None),
        lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),
    ):
        module = nn.Linear(2, 2)
        assert not _torch.has_backward_hooks(module.weight)
        register(module)
        assert _torch.has_backward_hooks(module.weight)
        assert not _torch.has_backward_hooks(module)
    for register in (
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    ):
        module = nn.Linear(2, 2)
        register(module)
        assert _torch.has_backward_hooks(module)


def test_flags_of_plain_tensors_and_of_dtensors_are_read(parameter):
    frozen = nn.Parameter(parameter.detach(), requires_grad=False)
    given = [parameter, nn.Parameter(X), X.detach(), frozen]
    assert _torch.gradient_flags(given) == [x.requires_grad for x in given]
    parameter.requires_grad_(False)
    assert _torch.gradient_flags([parameter]) == [False]


# Modes of torch in which a snapshot of flags is asked, some of them others than it was last asked in.
MODES = {
    "as before": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("made_in", MODES.values(), ids=MODES)
@pytest.mark.parametrize("index", range(3))
def test_a_flag_that_changes_is_noticed_in_every_mode(parameter, index, made_in, mode) -> None:
    given = [parameter, nn.Parameter(X.clone()), nn.Parameter(X.clone(), requires_grad=False)]
    with made_in():
        flags = _torch.GradientFlags(given)
        assert flags.hold() and flags.hold()
    with mode():
        assert flags.hold() and flags.changed() == []
        given[index].requires_grad_(not given[index].requires_grad)
        assert not flags.hold()
    assert not flags.hold()
    (changed,) = flags.changed()
    assert changed is given[index]
    changed.requires_grad_(not changed.requires_grad)
    assert flags.hold() and flags.hold()


def test_flags_hold_where_a_parameter_has_other_values_sizes_or_dtype() -> None:
    given = [nn.Parameter(X.clone()), nn.Parameter(X.clone())]
    flags = _torch.GradientFlags(given)
    assert flags.hold()
    for data in (torch.ones(5), torch.ones(2, 2), torch.ones(5, dtype=torch.float64)):
        given[0].data = data
        assert flags.hold()
        given[1].requires_grad_(False)
        assert not flags.hold()
        given[1].requires_grad_(True)


def test_flags_are_not_read_one_by_one_again_where_two_modules_share_a_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tied, other = nn.Parameter(X.clone()), nn.Parameter(X.clone())
    flags = _torch.GradientFlags([tied, other, tied])
    assert flags.hold()
    with monkeypatch.context() as patch:
        patch.setattr(_torch.autograd, "gradient_flags", None)  # to call it would raise
        assert flags.hold()
    tied.requires_grad_(False)
    assert not flags.hold()
    assert [x is tied for x in flags.changed()] == [True]


def test_the_flags_of_no_tensors_hold() -> None:
    assert _torch.GradientFlags([]).hold()


def test_the_innermost_saved_tensor_hooks_are_found() -> None:
    pack, unpack = _torch.saved_tensor_hooks()
    x = torch.ones(2)
    assert unpack(pack(x)) is x
    with torch.autograd.graph.saved_tensors_hooks(lambda x: "packed", lambda packed: x):
        pack, unpack = _torch.saved_tensor_hooks()
        assert pack(x) == "packed" and unpack("packed") is x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_applications_of_functions_are_taken():
    def take(apply, function, args, kwargs):
        assert function is Twice
        return 10 * apply(function, *args, **kwargs)

    before = Twice.apply
    with _torch.applying_functions_by(take):
        assert Twice.apply(torch.ones(1)) == 20 == before(torch.ones(1))
    assert Twice.apply(torch.ones(1)) == 2 == before(torch.ones(1))


def test_an_application_that_is_let_through_has_its_own_derivative():
    held, x = Twice.apply, torch.ones(1, requires_grad=True)
    expected = torch.autograd.grad(held(x), x)
    with _torch.applying_functions_by(lambda apply, function, args, _: apply(function, *args)):
        for apply in (held, Twice.apply):
            assert torch.autograd.grad(apply(x), x) == expected


def test_what_is_put_in_the_place_of_a_result_may_have_a_derivative():
    def take(apply, function, args, kwargs):
        return apply(function, args[0].detach()), args[0] * 5

    held, x = Twice.apply, torch.ones(1, requires_grad=True)
    with _torch.applying_functions_by(take):
        plain, taken = held(x)
    assert not plain.requires_grad and taken.requires_grad


def test_what_runs_outside_of_a_trace_is_not_in_it():
    class Model(nn.Module):
        def forward(self, x):
            with _torch.outside_of_traces():
                assert torch.is_grad_enabled()
                with torch.no_grad():
                    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
            return x + 1

    graph = torch.export.export(Model(), (torch.ones(2),), strict=False).graph
    assert [n.name for n in graph.nodes if n.op == "call_function"] == ["add"]


def test_transforms_are_seen():
    seen = []
    torch.func.vmap(lambda x: seen.append(_torch.in_functorch_transform()) or x)(torch.ones(2))
    assert seen == [True] and not _torch.in_functorch_transform()


def test_what_is_no_argument_of_a_transform_is_computed_outside_of_it():
    weight = torch.tensor(3.0, requires_grad=True)

    def scaled(x):
        with _torch.outside_functorch_transforms():
            assert not _torch.in_functorch_transform()
            twice = Twice.apply(weight)  # it has no rules for transforms
        assert _torch.in_functorch_transform()
        return x * twice

    slopes = torch.func.vmap(torch.func.grad(scaled))(torch.ones(2))
    slopes.sum().backward()
    assert slopes.tolist() == [6.0, 6.0] and weight.grad is not None and weight.grad.item() == 4.0


def test_the_ops_of_a_function_and_of_its_derivative_are_traced():
    def run(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf.sin(), leaf, torch.ones_like(x))

    found = [str(n.target) for n in _torch.traced_ops(run, [torch.ones(2)]).nodes]
    assert "aten.sin.default" in found and "aten.cos.default" in found


def test_a_running_node_knows_where_its_forward_ran():
    found = []
    with _torch.noting_forward():
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
    y.register_hook(lambda gradient: found.append(_torch.forward_of_running_node()))
    x.register_hook(lambda gradient: found.append(_torch.forward_of_running_node()))
    y.sum().backward()
    assert _torch.forward_of_running_node() is None
    assert any("y = x.exp()" in each[-1] for each in found if each)


def test_tensors_are_alike_in_shape_strides_dtype_flag_device_and_modes():
    x = torch.ones(4, 4).requires_grad_()
    check = _torch.alike_check([x, torch.ones(2)])
    assert check(torch.zeros(4, 4).requires_grad_(), torch.zeros(2))
    others = [
        torch.ones(4, 4),
        torch.ones(4, 4).t().requires_grad_(),
        torch.ones(4, 4).double().requires_grad_(),
        torch.ones(4, 5).requires_grad_(),
        torch.ones(4, 4, device="meta").requires_grad_(),
    ]
    assert not any(check(y, torch.ones(2)) for y in others)
    with torch.inference_mode():
        assert not check(x, torch.ones(2))
    assert not _torch.alike_check([])()


def test_a_check_that_tensors_are_alike_keeps_none_of_them_alive():
    x = torch.ones(2)
    gone, check = weakref.ref(x), _torch.alike_check([x])
    del x
    gc.collect()
    assert gone() is None
    assert check(torch.zeros(2))


@pytest.mark.parametrize(("use", "is_saved"), [(torch.square, True), (lambda x: x + 1, False)])
def test_a_graph_that_is_there_is_known_by_what_it_saves_or_when_it_runs(use, is_saved):
    x, came = torch.ones(2, requires_grad=True), []
    assert not _torch.is_saved_by_autograd(x)
    y = use(x)
    assert _torch.is_saved_by_autograd(x) == is_saved
    _torch.call_before_accumulation(x, lambda: came.append(x.grad))
    y.sum().backward()
    assert came == [None] and x.grad is not None
