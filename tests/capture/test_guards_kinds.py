"""A value that Python changes between steps: the compiled step does what the plain one does, or says no."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.support.scripts import Scaled, both, line_of, refusal, squares


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_an_annealed_attribute() -> None:
    found, plain = both(Scaled, squares, lambda m, i: setattr(m, "beta", 0.5 * i + 0.5))
    assert found == plain


def test_a_closure_and_a_list_of_the_loss() -> None:
    weights = [1.0, 2.0]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return squares(out, y) * weights[0] + out.abs().mean() * weights[1]

    def between(model: nn.Module, i: int) -> None:
        weights[:] = [1.0 + i, 2.0 - 0.1 * i]

    found, plain = both(Scaled, loss, between)
    assert found == plain


def test_a_replaced_head() -> None:
    heads = [nn.Linear(4, 3).double() for _ in range(2)]

    def between(model: nn.Module, i: int) -> None:
        if i in (2, 4):
            model.head = copy.deepcopy(heads[i // 2 - 1])

    found, plain = both(Scaled, squares, between)
    assert found == plain


def test_a_tensor_attribute() -> None:
    found, plain = both(
        Scaled, squares, lambda m, i: setattr(m, "beta", torch.tensor(0.5 * i + 0.5))
    )
    assert found == plain


def test_a_tensor_attribute_that_is_filled() -> None:
    def between(model: nn.Module, i: int) -> None:
        if i == 0:
            model.beta = torch.tensor(0.5)
        model.beta.fill_(0.5 * i)

    found, plain = both(Scaled, squares, between)
    assert found == plain


class Counting(Scaled):
    """A counter that forward increments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_counter_counts_and_costs_one_capture(caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    with caplog.at_level("INFO", "autopar"):
        found, plain = both(Counting, squares, lambda m, i: seen.append(m.calls))
    assert found == plain
    assert seen == [0, 1, 2, 3, 4] * 2
    assert "again" not in caplog.text


class WarmingUp(Scaled):
    """A counter that forward increments and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 3)


def test_a_counter_that_the_forward_reads() -> None:
    found, plain = both(WarmingUp, squares, lambda m, i: None)
    assert found == plain


class Dropping(Scaled):
    """Dropout, of p 0 or 1, which draws nothing that could differ."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def test_the_probability_of_dropout() -> None:
    found, plain = both(Dropping, squares, lambda m, i: setattr(m.drop, "p", float(i % 2)))
    assert found == plain


class Skipping(Scaled):
    """Layer drop by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return self.head(x)
        return super().forward(x)


class NoisyByNumpy(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.rand())


class NoisyByGenerator(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.source = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.source.uniform()


def test_python_draws_are_refused_by_their_line() -> None:
    message = refusal(Skipping)
    assert (
        "draws from Python's or numpy's random numbers" in message
        and line_of(Skipping, "random.random()") in message
    )
    message = refusal(NoisyByNumpy)
    assert (
        "draws from Python's or numpy's random numbers" in message
        and line_of(NoisyByNumpy, "np.random.rand()") in message
    )
    message = refusal(NoisyByGenerator)
    assert (
        "reads the Generator model.source" in message
        and line_of(NoisyByGenerator, "uniform()") in message
    )


TABLE = {"scale": 1.0}


class FromTable(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE["scale"]


def test_a_global_table() -> None:
    found, plain = both(FromTable, squares, lambda m, i: TABLE.update(scale=1.0 + i))
    assert found == plain


class Growing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(self.factors)


def test_a_list_that_a_script_grows() -> None:
    found, plain = both(Growing, squares, lambda m, i: m.factors.append(0.5))
    assert found == plain


class Recording(Scaled):
    """A list that forward grows."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean())
        return super().forward(x)


def test_a_list_that_forward_grows_is_refused_by_its_line() -> None:
    message = refusal(Recording)
    assert "changes model.means" in message and line_of(Recording, "self.means.append") in message


class Remembering(Scaled):
    """An attribute that forward sets to a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out
        return out


def test_a_tensor_attribute_that_forward_sets_is_refused_by_its_line() -> None:
    message = refusal(Remembering)
    assert "sets model.last" in message and line_of(Remembering, "self.last = out") in message


class Noting(Scaled):
    """An attribute that forward sets to a number."""

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1]
        return super().forward(x)


def test_a_number_that_forward_sets_is_set() -> None:
    seen: list[Any] = []
    found, plain = both(Noting, squares, lambda m, i: seen.append(vars(m).pop("width", None)))
    assert found == plain
    assert seen == [None, 4, 4, 4, 4] * 2


class Hooked(Scaled):
    """A forward hook that stores what it sees."""

    def __init__(self) -> None:
        super().__init__()
        store: dict[str, Tensor] = {}

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            store["out"] = out.detach()

        self.body.register_forward_hook(keep)


def test_a_forward_hook_that_stores_is_refused_by_its_line() -> None:
    message = refusal(Hooked)
    assert "changes store of" in message and line_of(Hooked, "def keep") in message


def test_a_failed_capture_leaves_no_fake_tensor() -> None:
    model = Recording()
    with pytest.raises(CaptureError):
        autopar.compile(model, loss_fn=squares).step(torch.ones(6, 4), torch.ones(6, 3))
    assert model.means == []
