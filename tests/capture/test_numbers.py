"""Numbers that change between steps are inputs of one program, wherever only arithmetic depends on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.runtime.model import module_programs
from tests.support.odd.odd_kinds import Counting

STEPS = 5
WEIGHT = 1.0  # a global that the loss reads


class Scaled(nn.Module):
    """A number beside tensors with dims and without, and arithmetic of the number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.beta = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        penalty = (1 - self.beta) ** 2 * y.abs().mean()
        return y * self.beta + penalty - self.beta / 3


class Branching(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * 2 if self.beta > 0.5 else y


class Asking(Scaled):
    """A tensor would take the other branch, and nothing would say so."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * self.beta if isinstance(self.beta, float) else y


class Dropping(Scaled):
    """The keyword of an op."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.body(x), negative_slope=self.beta)


class Both(Scaled):
    """The keyword of an op, and arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return F.leaky_relu(y, negative_slope=self.beta) * self.beta


class Exponential(Scaled):
    """A Python value of the number, and arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * math.exp(self.beta) + self.beta


class Stepwise(Scaled):
    """An integer of the number, the same for many values, and arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * (1 + int(self.beta * 1.5)) + self.beta


class Listed(Scaled):
    """An entry of a dict, and arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * {0.9: 1.0, 0.9**2: 2.0}.get(self.beta, 1.0) + self.beta


class AskingBoth(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        weight = self.beta if isinstance(self.beta, float) else 7.0
        return y * weight + self.beta


class Halving(Scaled):
    """Forward writes half of the number that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.beta
        self.beta = self.beta * 0.5
        return y


class OfClass(nn.Module):
    """A number of the class, which an attribute of the object would hide."""

    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * self.beta


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return y.square().mean()


def set_attribute(model: nn.Module, value: float) -> None:
    model.beta = value


def set_global(model: nn.Module, value: float) -> None:
    global WEIGHT
    WEIGHT = value


def loss_of_global(y: Tensor, target: Tensor) -> Tensor:
    return WEIGHT * F.mse_loss(y, target) + y.mean() / WEIGHT


def trained(
    model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], change: Any, dtype: torch.dtype
) -> list[Tensor]:
    """The loss of every step, and in the end the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for number in range(STEPS):
        x, y = (torch.randn(8, 4, generator=generator, dtype=dtype) for _ in range(2))
        change(model, 0.9 ** (number + 1))
        optimizer.zero_grad()
        losses.append(step(x, y).detach())
        optimizer.step()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def both(
    model: nn.Module,
    change: Callable[[nn.Module, float], None],
    loss_fn: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[Tensor], int]:
    """Results of plain training and of the compiled model, and the number of programs that were made."""
    made: list[bool] = []
    add = module_programs.ModulePrograms._add

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(True)
        return add(self, *args, **kwargs)

    monkeypatch.setattr(module_programs.ModulePrograms, "_add", counted)
    model = model.to(dtype)
    plain = copy.deepcopy(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(plain(x), y)
        loss.backward()
        return loss

    expected = trained(plain, step, change, dtype)
    compiled = autopar.compile(model, device="cpu", loss_fn=loss_fn)
    found = trained(compiled, compiled.step, change, dtype)
    return expected, found, len(made)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_annealed_attribute_takes_two_programs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the first number built in, and one for all others."""
    expected, found, programs = both(Scaled(), set_attribute, F.mse_loss, monkeypatch, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype.itemsize == 8 else 1e-5, atol=0)
    assert programs == 2


def test_a_global_that_a_loss_reads_takes_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found, programs = both(Scaled(), set_global, loss_of_global, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


def test_a_number_in_a_closure_takes_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 1.0

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return weight * F.mse_loss(y, target)

    def change(model: nn.Module, value: float) -> None:
        nonlocal weight
        weight = value

    expected, found, programs = both(Scaled(), change, loss_fn, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


def test_a_number_of_a_namespace_takes_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(weight=1.0)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target) * config.weight

    def change(model: nn.Module, value: float) -> None:
        config.weight = value

    expected, found, programs = both(Scaled(), change, loss_fn, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


def test_a_forward_that_reads_no_number_leaves_it_an_input_of_steps() -> None:
    """A number of the loss alone; a step of another shape has it as an input from its first capture on."""
    global WEIGHT
    WEIGHT = 1.0
    model = Scaled().double()
    plain = copy.deepcopy(model)
    compiled = autopar.compile(model, device="cpu", loss_fn=loss_of_global)
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    found, expected = [], []
    for weight, rows in ((1.0, 8), (0.9, 8), (0.8, 8), (0.7, 4), (0.6, 4)):
        WEIGHT = weight
        compiled(batch[0])
        x, y = (each[:rows] for each in batch)
        found.append(compiled.step(x, y).item())
        expected.append(loss_of_global(plain(x), y).item())
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(compiled._kept.ready[True]) == 3  # 8 rows with the first number, 8 rows, 4 rows


@pytest.mark.parametrize("kind", [Branching, Asking, Dropping, Both, Exponential, Stepwise, Listed, AskingBoth])
def test_a_number_on_which_more_depends_stays_built_in(kind: type[Scaled], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is captured for every value, and is right for every value."""
    expected, found, programs = both(kind(), set_attribute, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == STEPS


def test_of_two_numbers_the_one_that_can_be_is_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both change in the first step, then one of them alone."""
    config = SimpleNamespace(weight=1.0, slope=0.5)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return config.weight * F.mse_loss(y, target) + F.leaky_relu(y, config.slope).mean()

    def change(model: nn.Module, value: float) -> None:
        config.weight, config.slope = value, 0.25 if value < 0.85 else 0.5

    expected, found, programs = both(Scaled(), change, loss_fn, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


def test_a_number_of_a_class_stays_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module, value: float) -> None:
        OfClass.beta = value

    model = OfClass()
    expected, found, programs = both(model, change, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == STEPS and "beta" not in vars(model)


def test_a_number_that_forward_writes_stays_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found, programs = both(Halving(), lambda model, value: None, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == STEPS


def test_a_counter_keeps_no_number_from_being_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    expected, found, programs = both(model, set_attribute, mean_square, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2 and model.calls == STEPS


def test_what_is_no_number_any_more_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module, value: float) -> None:
        model.beta = 2 if value < 0.6 else value

    expected, found, programs = both(Scaled(), change, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 3


def set_tensor(model: nn.Module, value: float) -> None:
    model.beta = torch.tensor(value, dtype=torch.float64)


def fill_tensor(model: nn.Module, value: float) -> None:
    if not isinstance(model.beta, Tensor):
        set_tensor(model, 1.0)
    model.beta.fill_(value)


def set_whole(model: nn.Module, value: float) -> None:
    model.beta = round(10 * value)  # 9, 8, 7, 7, 6


@pytest.mark.parametrize("change", [set_tensor, fill_tensor, set_whole])
def test_tensors_without_dims_and_ints_take_two_programs(
    change: Callable[[nn.Module, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scaled()
    change(model, 1.0)
    expected, found, programs = both(model, change, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


def test_a_tensor_in_a_closure_takes_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.tensor(1.0)

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target) * weight + y.mean() / (1 + weight)

    def change(model: nn.Module, value: float) -> None:
        nonlocal weight
        weight = torch.tensor(value)

    expected, found, programs = both(Scaled(), change, loss_fn, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 2


class Valued(Scaled):
    """The Python value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * float(self.beta) + self.beta


class Wide(Scaled):
    """An int that is a size."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y.repeat(1, int(self.beta))[:, :4] * self.beta


@pytest.mark.parametrize(("kind", "change"), [(Valued, set_tensor), (Wide, set_whole)])
def test_tensors_and_ints_on_which_more_depends_stay_built_in(
    kind: type[Scaled], change: Callable[[nn.Module, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    change(model, 1.0)
    expected, found, programs = both(model, change, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == (STEPS if change is set_tensor else 4)  # 9, 8, 7, 6


def test_a_tensor_of_another_kind_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: nn.Module, value: float) -> None:
        model.beta = torch.tensor(value, dtype=torch.float64 if value > 0.6 else torch.float32)

    expected, found, programs = both(Scaled(), change, F.mse_loss, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert programs == 3  # a tensor in place of the float 1.0, then inputs of two kinds
