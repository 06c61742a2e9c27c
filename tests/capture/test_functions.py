"""A torch.autograd.Function is one call of the captured graph, with its own backward, or it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.capture.captured import Captured
from autopar.capture.export import capture_step
from autopar.errors import CaptureError
from autopar.rules import spec
from autopar.rules.functions import CustomFunction
from tests.support import functions
from tests.support.functions import NAMES, made, plain, worst


@functools.cache
def captured(name: str) -> Captured:
    model, batch = made(name)
    return capture_step(model, batch, {}, None)


def calls(of: Captured) -> list[fx.Node]:
    return [n for n in of.module.graph.nodes if isinstance(n.target, CustomFunction)]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_trains_as_plain_pytorch(name: str) -> None:
    model, batch = made(name)
    loss = autopar.compile(model, example_inputs=batch).step(*batch)
    found = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}
    assert worst(found, plain(name)) == 0


def test_every_application_is_one_call() -> None:
    found = [n.target.function for n in calls(captured("stack"))]  # type: ignore[union-attr]
    layer = [functions.Reversal, functions.ScaledExp]
    assert found == [*layer * 4, functions.AsItIs]


# By hand; d0 is the last dim. A norm over everything leaves none, and a division by len(batch) the last alone.
FREE = {
    "straight_round": {"d0", "d1"},
    "reversal": {"d0", "d1"},
    "scaled_exp": {"d0", "d1"},
    "two_of_two": {"d0", "d1"},
    "as_it_is": {"d0", "d1"},
    "with_setup": {"d0", "d1"},
    "no_gradient": set(),
    "whole_norm": set(),
    "by_count": {"d0"},
    "of_a_weight": {"d0"},
}


@pytest.mark.parametrize("name", FREE)
def test_what_a_trace_shows_to_be_point_wise_can_be_split(name: str) -> None:
    (call,) = calls(captured(name))
    found, _ = spec(call)
    assert {x for x in found.sizes if found.splittable(x)} == FREE[name]


def test_what_ctx_keeps_is_counted() -> None:
    kept = {name: spec(calls(captured(name))[0])[0].kept for name in FREE}
    assert kept["straight_round"][:2] == ((), ())
    assert kept["scaled_exp"][:2] == ((), (0,))
    assert kept["two_of_two"][:2] == ((0, 1), ())
    assert kept["no_gradient"][:2] == ((1,), ())
    assert not any(each.hidden for each in kept.values())


class Masked(torch.autograd.Function):
    """Keeps a mask of the size of its operand and five numbers more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        ctx.more = [torch.ones(5)]
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Applies(nn.Module):
    """A layer, and what is given on its result."""

    def __init__(self, apply: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.apply_ = nn.Linear(4, 4), (apply,)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_[0](self, self.linear(x)).sum()


def capture(apply: Callable[[Any, Tensor], Any]) -> Captured:
    return capture_step(Applies(apply), (torch.ones(2, 4),), {}, None)


def test_other_tensors_that_ctx_keeps_are_counted() -> None:
    (call,) = calls(capture(lambda net, x: Masked.apply(x)))
    found, _ = spec(call)
    mask, more = found.kept.hidden
    assert (mask.letters, mask.dtype, mask.times) == (found.results[0], torch.bool, 1)
    assert (more.letters, more.dtype, more.times) == ((), torch.float32, 5)


def function(forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Any:
    """A class named Odd of these two."""
    backward = backward or (lambda ctx, gradient: gradient)
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Odd", (torch.autograd.Function,), members)


def _inner_gradient(net: Any, x: Tensor) -> Tensor:
    y = Masked.apply(x)
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0] + y


class Odd(torch.autograd.Function):
    """Written as torch.func asks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an operand changed in place": (
        lambda net, x: function(lambda ctx, x: x.add_(1)).apply(x),
        "changes one of its arguments in place",
    ),
    "values read": (
        lambda net, x: function(lambda ctx, x: x * float(x.max())).apply(x),
        "reads the values of a tensor in its forward",
    ),
    "a parameter that is not an argument": (
        lambda net, x: function(lambda ctx, x: x * net.scale).apply(x),
        r"computes with .*of shape \[4\], which is not one of its arguments",
    ),
    "an activation that is not an argument": (
        lambda net, x: function(lambda ctx, y: y * x).apply(x.sin()),
        r"computes with .*of shape \[2, 4\], which is not one of its arguments",
    ),
    "a parameter in backward": (
        lambda net, x: function(lambda ctx, x: x.exp(), lambda ctx, g: g * net.scale).apply(x),
        "which is not one of its arguments",
    ),
    "draws in backward": (
        lambda net, x: function(lambda ctx, x: x.exp(), lambda ctx, g: g * torch.rand_like(g)).apply(x),
        "draws random numbers in its backward",
    ),
    "no tensor": (lambda net, x: function(lambda ctx, x: 3).apply(x) * x, "returns no tensor"),
    "an object": (lambda net, x: function(lambda ctx, x: (x.exp(), object())).apply(x)[0], "returns object"),
    "a transform": (lambda net, x: torch.func.vmap(Odd.apply)(x), "inside a transform of torch.func"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_line(name: str) -> None:
    apply, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(apply)
    text = str(caught.value)
    assert "test_functions.py:" in text and "Odd (" in text and "remedy: " in text


def test_a_gradient_inside_forward_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"The forward computes a gradient through the torch.autograd.Function .*Masked"
    ):
        capture(_inner_gradient)


def test_a_backward_that_reads_values_is_kept() -> None:
    """It cannot be tried without values, and is taken to give every gradient."""

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1) if gradient.abs().max() > 1 else 2 * gradient

    (call,) = calls(capture(lambda net, x: function(lambda ctx, x: x.exp(), backward).apply(x)))
    assert not call.target.trial.ungraded and not spec(call)[1]  # type: ignore[union-attr]


def test_a_parameter_without_a_gradient_has_none() -> None:
    """An optimizer passes such a parameter by, as in plain PyTorch: zeros would decay it."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    model, batch = Applies(lambda net, x: Gate.apply(x, net.scale)), torch.ones(2, 4)
    autopar.compile(model, example_inputs=batch).step(batch)
    assert model.scale.grad is None and model.linear.weight.grad is not None


def test_autocast_is_that_of_the_application() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return (gradient.float() @ weight.T), 2 * (x.T @ gradient.float())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, 16).reshape(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = Product.apply(x, self.weight)
            return y.float().sum()

    x = torch.linspace(0, 3, 8).reshape(2, 4)
    expected, model = Model(), Model()
    expected(x).backward()
    autopar.compile(model, example_inputs=x).step(x)
    assert torch.equal(model.weight.grad, expected.weight.grad)
