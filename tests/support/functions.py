"""Models with autograd.Functions of their own, each with a backward that is not the derivative of its forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.proof.verdict import nan_last

Batch = tuple[Tensor, Tensor]


class StraightRound(torch.autograd.Function):
    """Rounds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversal(torch.autograd.Function):
    """Changes nothing, and turns the gradient round; saves a number on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class ScaledExp(torch.autograd.Function):
    """exp, with three times its derivative; keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 3 * gradient * y


class TwoOfTwo(torch.autograd.Function):
    """Two operands and two results; the backward crosses their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return first * x + second, second * y - first


class AsItIs(torch.autograd.Function):
    """Returns its operand itself, and clips the gradient, which is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class WithSetup(torch.autograd.Function):
    """Written with setup_context, a keyword and a structure among its arguments."""

    @staticmethod
    def forward(x: Tensor, options: dict[str, float], power: int = 2) -> Tensor:
        return options["scale"] * x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.options, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.options["scale"] * x.abs() * ctx.power, None, None


class NoGradient(torch.autograd.Function):
    """Gives its second operand no gradient, and its second result takes none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.save_for_backward(weight)
        largest = x.amax(-1, keepdim=True)
        ctx.mark_non_differentiable(largest)
        return x * weight, largest, None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any, __: Any) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return 2 * gradient * weight, None


class WholeNorm(torch.autograd.Function):
    """Divides the gradient by its norm over everything: no dim can be split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class ByCount(torch.autograd.Function):
    """Point-wise, but for a number that it reads from the length of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[0]


rounded = StraightRound.apply


class Net(nn.Module):
    """Two layers, and what is given between them, in a loss that no rounding makes zero."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = (between,)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.between[0](self, self.up(x) * 2)
        return ((self.down(hidden) * self.weight[:8] - target) ** 2).mean()


def _two(net: nn.Module, x: Tensor) -> Tensor:
    first, second = TwoOfTwo.apply(x, x.cos() * net.weight)
    return first - second.tanh()


def _no_gradient(net: nn.Module, x: Tensor) -> Tensor:
    first, largest, nothing = NoGradient.apply(x, net.weight)
    assert nothing is None
    return first / (1 + largest**2)


BETWEEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "straight_round": lambda net, x: StraightRound.apply(x),
    "reversal": lambda net, x: Reversal.apply(x, 0.3),
    "looked_up": lambda net, x: rounded(x),
    "scaled_exp": lambda net, x: ScaledExp.apply(x),
    "two_of_two": _two,
    "as_it_is": lambda net, x: AsItIs.apply(x),
    "with_setup": lambda net, x: WithSetup.apply(x, {"scale": 0.7}, 3),
    "no_gradient": _no_gradient,
    "whole_norm": lambda net, x: WholeNorm.apply(x),
    "by_count": lambda net, x: ByCount.apply(x),
    "of_a_weight": lambda net, x: x * StraightRound.apply(4 * net.weight),
    "clipped_weight": lambda net, x: x * AsItIs.apply(net.weight),
}


class Layer(nn.Module):
    """A residual layer with a function in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + ScaledExp.apply(Reversal.apply(self.linear(self.norm(x)), 0.5))


class Stack(nn.Module):
    """Four layers, each with two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((self.head(AsItIs.apply(x)) - target) ** 2).mean()


NAMES = (*BETWEEN, "stack")


def made(name: str) -> tuple[nn.Module, Batch]:
    """A model in float64 and its batch, the same at every call."""
    torch.manual_seed(1)
    model = Stack() if name == "stack" else Net(BETWEEN[name])
    return model.double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())


def plain(name: str, micro_batches: int = 1) -> dict[str, Tensor | None]:
    """Loss and gradients of one process."""
    model, batch = made(name)
    losses = []
    for part in zip(*(x.chunk(micro_batches) for x in batch), strict=True):
        losses.append(model(*part) / micro_batches)
        losses[-1].backward()
    return {"loss": torch.stack(losses).sum().detach()} | {n: p.grad for n, p in model.named_parameters()}


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference; infinite for a NaN, and where only one of both has a gradient."""
    assert found.keys() == expected.keys()
    gaps = [0.0]
    for key, want in expected.items():
        got = found[key]
        if (got is None) != (want is None):
            return math.inf
        if want is not None:
            gap = float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))
            gaps.append(nan_last(gap))
    return max(gaps)
