"""Graphs of torch.compile lifted to modules: what a graph does to its arguments stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.backend import lifting
from autopar.errors import CaptureError


def _lifted(function: Callable[..., Any], *arguments: Any) -> tuple[lifting.Lifted, list[str]]:
    """The first graph that dynamo finds, lifted."""
    found: list[tuple[lifting.Lifted, list[str]]] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        names = lifting.argument_names(graph)

        def run(*arguments: Any) -> Any:
            found.append((lifting.lift(graph, names, arguments), names))
            return graph(*arguments)

        return run

    torch.compiler.reset()
    torch.compile(function, backend=backend)(*arguments)
    return found[0]


def test_parameters_and_buffers_have_the_names_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    lifted, names = _lifted(model, torch.ones(2, 4))
    own = dict(lifted.module.named_parameters())
    assert list(lifted.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"] == list(own)
    assert set(lifted.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert [names[i] for i in lifted.inputs] == ["args_0"]
    assert torch.equal(own["0.weight"], model[0].weight)


def test_parameters_are_parameters_where_nothing_takes_a_gradient() -> None:
    """A recipe splits factors of parameters: an evaluation is split as training is."""
    with torch.no_grad():
        lifted, _ = _lifted(nn.Linear(4, 4), torch.ones(2, 4))
    assert list(lifted.parameters) == ["weight", "bias"]
    assert not any(x.requires_grad for x in lifted.module.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_call_is_lifted_as_its_ops(use_reentrant: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    lifted, _ = _lifted(lambda x: checkpoint(torch.exp, x, use_reentrant=use_reentrant) + 1, x)
    assert torch.equal(lifted.module(x)[0], x.exp() + 1)


def test_a_result_that_is_a_view_of_an_argument_is_made_of_it() -> None:
    x = torch.arange(6.0, requires_grad=True)
    lifted, _ = _lifted(lambda x: (x.view(2, 3)[:, 1:], x.detach(), x.sum()), x)
    view, detached, computed = lifted.results
    assert torch.equal(view.of([x]), x.view(2, 3)[:, 1:]) and view.of([x]).requires_grad
    assert detached.of([x]).data_ptr() == x.data_ptr() and not detached.of([x]).requires_grad
    assert computed is None
    assert torch.equal(lifted.module(x)[0], x.sum())


def test_numbers_and_activations_are_known() -> None:
    x = torch.ones(3, 2, requires_grad=True) * 2
    torch._dynamo.mark_dynamic(x, 0)
    lifted, names = _lifted(lambda x: x.reshape(x.shape[0] * 2) * x.shape[0], x)
    assert [names[i] for i in lifted.inputs] == ["x"] and set(lifted.inputs) == lifted.differentiable
    assert torch.equal(lifted.module(x)[0], torch.full((6,), 6.0))


def _in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def test_what_is_changed_in_place_is_a_buffer_and_lifting_changes_nothing() -> None:
    x = torch.ones(2)
    lifted, _ = _lifted(_in_place, x)
    assert list(lifted.buffers) == ["x"] and not lifted.inputs
    assert torch.equal(x, torch.full((2,), 2.0)), "once, by the call itself"


def _writes_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    x.copy_(w)
    return x.sum()


def _two(x: Tensor, y: Tensor) -> Tensor:
    return _in_place(x)[1:] + y


def _off_inside_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return x @ x


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (_writes_a_gradient, lambda x: (x, x.clone().requires_grad_()), "detach it first"),
        (_two, lambda x: (x, x[1:]), "shares its memory with y"),
        (_off_inside_autocast, lambda x: (x.expand(3, 3),), "turns autograd off inside torch.autocast"),
    ],
)
def test_what_a_module_cannot_stand_for_is_refused(function: Any, arguments: Any, sentence: str) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=sentence):
        _lifted(function, *arguments(x))


def test_autograd_that_is_turned_on_inside_no_grad_is_refused() -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match="turns autograd on"):
        _lifted(torch.enable_grad()(lambda x: x * 2), torch.ones(3))


def test_a_compiled_optimizer_is_refused_unchanged() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    with pytest.raises(CaptureError, match="holds a tensor that requires a gradient"):
        _lifted(optimizer.step)
    assert torch.equal(weight, torch.ones(2))
