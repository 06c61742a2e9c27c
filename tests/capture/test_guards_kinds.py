"""A value that Python changes between steps: the compiled step does what the plain one does, or says no."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

Between = Callable[[nn.Module, int], object]


def trained(model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], between: Between) -> list[float]:
    """The losses of five steps of SGD, before each of which a script changes something."""
    torch.manual_seed(1)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    losses = []
    for number in range(5):
        between(model, number)
        loss = step(*batch)
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return losses


def both(make: Callable[[], nn.Module], loss_fn: Any, between: Between) -> list[float]:
    """The losses of the compiled model, which must be those of the plain one, bit by bit."""
    torch.manual_seed(0)
    plain = make().double()
    compiled = copy.deepcopy(plain)

    def plain_step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(plain(x), y)
        loss.backward()
        return loss

    made = autopar.compile(compiled, loss_fn=loss_fn)
    expected = trained(plain, plain_step, between)
    found = trained(compiled, made.step, between)
    assert found == expected
    return found


def squares(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean()


class Scaled(nn.Module):
    """A linear layer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.beta: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) * self.beta


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_an_annealed_attribute() -> None:
    both(Scaled, squares, lambda m, i: setattr(m, "beta", 0.5 * i + 0.5))


def test_a_closure_and_a_list_of_the_loss() -> None:
    weights = [1.0, 2.0]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return squares(out, y) * weights[0] + out.abs().mean() * weights[1]

    def between(model: nn.Module, i: int) -> None:
        weights[:] = [1.0 + i, 2.0 - 0.1 * i]

    both(Scaled, loss, between)


def test_a_replaced_head() -> None:
    heads = [nn.Linear(4, 3).double() for _ in range(2)]

    def between(model: nn.Module, i: int) -> None:
        if i in (2, 4):
            model.head = copy.deepcopy(heads[i // 2 - 1])

    both(Scaled, squares, between)
