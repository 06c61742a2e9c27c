"""Scripts that read and write Python state in odd ways: each equals the plain run, or is refused by its line."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture.export import capture_forward
from autopar.capture.guards.guards import Guard, Guards, Place
from autopar.capture.guards.structure import Structure
from autopar.capture.guards.values import noted_in
from autopar.errors import CaptureError
from tests.support.odd.odd_caches import CACHES
from tests.support.odd.odd_scripts import HOOKS, SCRIPTS
from tests.support.scripts import by_compile, line_of, outcome
from tests.support.tables import often

REFUSED = [name for name, script in SCRIPTS.items() if script.line]
TRAINED = [name for name in SCRIPTS if name not in (*REFUSED, *HOOKS, *CACHES)]  # see test_caches.py

# One script for every kind of place that is read or written; benchmarks/parity/odd_scripts.py runs them all.
PLACES = {
    "annealed attribute",
    "head replaced",
    "tensor attribute",
    "tensor attribute that is filled",
    "counter that forward reads",
    "probability of dropout",
    "list that the script grows",
    "number that forward sets",
    "nested object",
    "slots",
    "class attribute shadowed",
    "attribute that appears",
    "enum",
    "None to number",
    "tuple",
    "dict entry",
    "dict iteration",
    "set",
    "nested global table",
    "deque",
    "numpy array",
    "list alias",
    "tensor replaced in a dict",
    "activation",
    "property",
    "global number",
    "attribute of a module",
    "attribute of the loss function",
    "global of a helper",
    "environment",
    "method of an object",
    "nonlocal of the loss",
    "entry of a partial's argument",
    "frozen parameters",
    "eval of one layer",
    "eps",
    "forward hook added and removed",
    "forward pre-hook added",
    "forward replaced",
    "parameter replaced",
    "layer appended",
    "attribute that nothing reads",
    "cached property of an object",
    "descriptor",
    "own __getattr__",
    "weak dict",
    "thread-local value",
    "context variable",
    "chain of dicts",
    "operators of an object",
    "class patched",
    "bound method replaced",
    "mutable default",
    "frozen parameter that forward asks for",
    "buffer replaced by a tensor",
    "state dict edited",
    "layers in another order",
    "counter in the dict of the model",
}
# And for every kind of refusal.
REFUSALS = {
    "layer drop by random.random",
    "numpy draw",
    "generator of numpy",
    "list that forward grows",
    "tensor that forward keeps",
    "forward hook that keeps a tensor",
    "clock",
    "itertools.count",
    "own random.Random",
    "list of a global",
    "global counter",
    "attribute of an object",
    "deleted attribute",
    "weak reference",
    "generator",
    "hooks on saved tensors",
    "hook on the gradient of an activation",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", often(TRAINED, PLACES))
def test_a_script_trains_as_it_does_plainly(name: str) -> None:
    expected = outcome(SCRIPTS[name])
    assert outcome(SCRIPTS[name], by_compile) == expected


@pytest.mark.parametrize("name", often(REFUSED, REFUSALS))
def test_a_script_is_refused_by_its_line(name: str) -> None:
    script = SCRIPTS[name]
    with pytest.raises(CaptureError) as caught:
        outcome(script, by_compile)
    message = str(caught.value)
    assert script.cause in message and line_of(script.make, script.line) in message


@pytest.mark.parametrize("name", often(HOOKS, [name for name in HOOKS if "step 2" in name or "parameter" in name]))
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


class _Partial(torch.nn.Linear):
    """Has a forward that is another object whenever it is read."""

    def scaled(self, x: Tensor, *, factor: float) -> Tensor:
        return super().forward(x) * factor

    forward = functools.partialmethod(scaled, factor=2.0)


def test_a_partial_forward_is_the_same_at_every_step() -> None:
    model = _Partial(2, 2)
    structure = Structure(model)
    assert structure.has_parts()


class _Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _without_layers(self: object, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("wrap", [lambda f: f, staticmethod, functools.partialmethod])
def test_a_forward_is_noticed_where_python_finds_it_first(wrap: Any) -> None:
    class Middle(_Doubled):
        pass

    class Last(Middle):
        pass

    for kind in (Last, Middle, _Doubled):
        structure = Structure(torch.nn.Sequential(Last(2, 2)))
        assert structure.hold()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "forward", wrap(_without_layers), raising=False)
            assert not structure.hold()
            assert "the forward of a module" in str(structure.broken())
        assert structure.hold()


def test_a_forward_that_only_wraps_the_same_function_is_another() -> None:
    class Wrapped(_Doubled):
        forward = _Doubled.forward

    structure = Structure(Wrapped(2, 2))
    Wrapped.forward = staticmethod(_Doubled.forward)  # type: ignore[assignment]
    assert Wrapped.forward is _Doubled.forward
    assert not structure.hold()


def test_other_bases_of_a_class_are_noticed() -> None:
    class Own(_Doubled):
        pass

    structure = Structure(Own(2, 2))
    Own.__bases__ = (_Partial,)
    assert not structure.hold()


@functools.lru_cache
def _ramp(count: int) -> Tensor:
    return torch.arange(count) / 3


class _Ramped(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _ramp(x.shape[1])


def test_a_cache_keeps_no_tensor_of_a_trace() -> None:
    _ramp.cache_clear()
    model, x = _Ramped(2, 2), torch.ones(2, 2)
    capture_forward(model, (x,), {})
    assert type(_ramp(2)) is Tensor and type(model(x)) is Tensor


def test_a_cache_is_guarded_against_emptying_alone() -> None:
    _ramp(2)
    captured = capture_forward(_Ramped(2, 2), (torch.ones(2, 2),), {})
    _ramp(3)
    assert captured.guards.hold()
    _ramp.cache_clear()
    assert not captured.guards.hold()


class _Tools:
    """What a library does its work with, for tensors of torch."""

    def __init__(self) -> None:
        self.torch = torch

    def flipped(self, x: Tensor) -> Tensor:
        return self.torch.flip(x, (-1,))


_LOADED: dict[str, _Tools] = {}
_BY_TYPE: dict[type, _Tools] = {}


def _tools_of(x: Tensor) -> _Tools:
    """The tools for a type of tensors, made when it is first met, as einops does it."""
    if type(x) not in _BY_TYPE:
        if "torch" not in _LOADED:
            _LOADED["torch"] = _Tools()
        _BY_TYPE[type(x)] = _LOADED["torch"]
    return _BY_TYPE[type(x)]


class _Flipped(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_tools_of(x).flipped(x)).square().mean()


def test_notes_of_a_librarys_own_parts_are_made_as_plainly() -> None:
    torch.manual_seed(0)
    plain = _Flipped(4, 2)
    model = autopar.compile(copy.deepcopy(plain))
    x = torch.arange(12.0).view(3, 4)
    found = [model.step(x).item() for _ in range(4)]
    assert list(_LOADED) == ["torch"] and _BY_TYPE
    noted = dict(_BY_TYPE)
    found += [model.step(x).item() for _ in range(2)]
    assert noted == _BY_TYPE
    assert found == pytest.approx([plain(x).item()] * 6)


def test_notes_that_hold_data_are_refused() -> None:
    for value in (1.0, [1], torch.ones(2), lambda held=[]: held, _Tools().flipped, [1].append):
        assert noted_in({"a": int, "b": value}, {"a": int}) is None
    assert noted_in({"a": 2, "b": int}, {"a": 1}) is None and noted_in({}, {"a": 1}) is None
    tools = _Tools()
    assert noted_in({"a": 1, "b": tools, int: len}, {"a": 1}) == {"b": tools, int: len}
    tools.count = 1
    assert noted_in({"b": tools}, {}) is None


def test_a_forward_of_a_layer_of_torch_that_is_replaced_is_captured_anew() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model, x = autopar.compile(copy.deepcopy(plain)), torch.ones(2, 4)
    for layers in (plain, model):
        before = layers(x)
        own = layers[0].forward
        layers[0].forward = lambda h, own=own: own(h) * 2
        assert not torch.allclose(layers(x), before)
    torch.testing.assert_close(model(x), plain(x))


def test_a_hook_of_all_modules_is_captured_anew() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model, x = autopar.compile(copy.deepcopy(plain)), torch.ones(2, 4)
    model(x)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out * 2 if isinstance(module, torch.nn.Linear) else out
    )
    try:
        torch.testing.assert_close(model(x), plain(x))
    finally:
        handle.remove()
    torch.testing.assert_close(model(x), plain(x))
