"""Scripts that read and write Python state in odd ways: each equals the plain run, or is refused by its line."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.guards import Guard, Guards, Place
from autopar.errors import CaptureError
from tests.support.odd_scripts import HOOKS, SCRIPTS
from tests.support.scripts import by_compile, line_of, outcome

REFUSED = [name for name, script in SCRIPTS.items() if script.line]
TRAINED = [name for name in SCRIPTS if name not in (*REFUSED, *HOOKS)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_trains_as_it_does_plainly(name: str) -> None:
    expected = outcome(SCRIPTS[name])
    assert outcome(SCRIPTS[name], by_compile) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_its_line(name: str) -> None:
    script = SCRIPTS[name]
    with pytest.raises(CaptureError) as caught:
        outcome(script, by_compile)
    message = str(caught.value)
    assert script.cause in message and line_of(script.make, script.line) in message


@pytest.mark.parametrize("name", HOOKS)
def test_a_backward_hook_is_refused_by_its_line(name: str) -> None:
    with pytest.raises(CaptureError, match=r"odd_writes\.py:\d+"):
        outcome(HOOKS[name], by_compile)


def test_a_closure_that_gc_has_frozen_is_guarded() -> None:
    script = SCRIPTS["nonlocal of the loss"]
    expected = outcome(script)
    gc.freeze()
    try:
        assert outcome(script, by_compile) == expected
    finally:
        gc.unfreeze()


class _Elsewhere(dict[str, int]):
    """A dict whose `get` reads an attribute in place of an entry."""

    value = 1

    def get(self, key: str, default: Any = None) -> Any:
        return self.value


def test_a_dict_with_its_own_get_is_asked_each_time() -> None:
    holder = _Elsewhere(x=1)
    guards = Guards([Guard(Place(holder, "x", "x", "here:1"), 1)])
    assert guards.hold()
    holder.value = 2
    assert not guards.hold()


class _Switched(torch.nn.Linear):
    """Reads a switch through a property that returns it and does nothing else."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self._is_off = False

    @property
    def is_off(self) -> bool:
        return self._is_off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean() * (0.5 if self.is_off else 1.0)


def test_a_property_that_returns_an_attribute_is_guarded() -> None:
    plain = _Switched()
    model = autopar.compile(plain)
    x = torch.ones(3, 4)
    whole = model.step(x).item()
    plain._is_off = True
    assert model.step(x).item() == pytest.approx(whole / 2)
