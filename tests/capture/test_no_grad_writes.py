"""Writes in place under `torch.no_grad`: buffers have the values of plain training, or the line is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class _Model(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.register_buffer("n", torch.zeros(2, dtype=torch.float64))


class Counting(_Model):
    """Two regions write one buffer, which the model reads after each."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n.add_(1)
        y = self.w * x * self.n.clone()
        with torch.no_grad():
            self.n.add_(1)
        return (y * self.n).sum()


class OfParameters(_Model):
    """What is written comes of a parameter, which gets no gradient for it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n.add_(self.w)
        y = self.w * x
        with torch.no_grad():
            self.n.mul_(0.5).add_(y.mean(0))
        return (y * self.n).sum()


class Averaging(_Model):
    """A moving average, called twice as by a discriminator that sees what is real and what is made."""

    @torch.no_grad()
    def note(self, y: Tensor) -> None:
        self.n.lerp_(y.mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w * x
        self.note(y)
        self.note(2 * y)
        return (y * self.n).sum()


class Out(_Model):
    """A result that is written into the buffer by name, then a copy into it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n = torch.add(self.n, 1, out=self.n)
        with torch.no_grad():
            self.n.copy_(self.n * 2)
        return (self.w * x * self.n).sum()


class OneEntry(_Model):
    """Views of the buffer are written, and one view reads what another wrote."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n[0].add_(1)
        y = self.w * x
        with torch.no_grad():
            self.n[1].add_(self.n[0])
        return (y * self.n).sum()


class GivenBack(_Model):
    """A region gives a parameter back as it is, and a later one writes what is computed of it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            same = self.w.to(torch.float64)
        y = same * x
        with torch.no_grad():
            self.n.add_(y.mean(0))
        return (y * self.n).sum()


class Activation(_Model):
    """Eager doubles the values, and leaves the gradient as it was: no graph of values says so."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.w * x
        with torch.no_grad():
            h.mul_(2)
        return h.square().sum()


class ReadBefore(_Model):
    """A view of an activation sees the write."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.w * x
        first = h[0]
        with torch.no_grad():
            h.mul_(2)
        return first.sum()


BUFFERS = [Counting, OfParameters, Averaging, Out, OneEntry, GivenBack]


def _steps(model: _Model, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Loss, gradient and buffer of three steps."""
    found = []
    for number in range(3):
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(3, 2) + number
        model.w.grad = None
        found.append(step(x).detach().clone())
        assert model.w.grad is not None
        found += [model.w.grad.clone(), model.n.clone()]
    return found


def _plain(model: _Model) -> list[Tensor]:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss

    return _steps(model, step)


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_has_what_every_region_writes(kind: type[_Model]) -> None:
    model = kind()
    expected = _plain(copy.deepcopy(model))
    compiled = autopar.compile(model, device="cpu")
    torch.testing.assert_close(_steps(compiled, compiled.step), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [Activation, ReadBefore])
def test_a_write_into_what_takes_a_gradient_is_refused_by_its_line(kind: type[_Model]) -> None:
    compiled = autopar.compile(kind(), device="cpu")
    with pytest.raises(CaptureError, match=r"h.mul_\(2\) writes under torch.no_grad into a tensor"):
        compiled.step(torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("kind", [*BUFFERS, Activation, ReadBefore])
def test_the_backend_runs_them_all(kind: type[_Model]) -> None:
    torch.compiler.reset()
    model = kind()
    expected = _plain(copy.deepcopy(model))
    compiled = torch.compile(model, backend="autopar")

    def step(x: Tensor) -> Tensor:
        loss: Tensor = compiled(x)
        loss.backward()
        return loss

    torch.testing.assert_close(_steps(model, step), expected, rtol=1e-12, atol=0)
