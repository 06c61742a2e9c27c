"""What several functions of a model read of one module, class or object is guarded for each of them."""

import enum
import sys
import types
from functools import cached_property
from typing import NamedTuple

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture_forward
from autopar.capture.guards.user_code import imports_of


class Inner:
    third = 3.0


class Scale:
    first, second = 1.0, 2.0

    def __init__(self):
        self.inner = Inner()


SETTINGS = types.ModuleType("settings_of_a_script")
SETTINGS.first, SETTINGS.second = 1.0, 2.0


class Body(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scales = [scale]

    def forward(self, x):
        scale = self.scales[0]
        return x * SETTINGS.second * Scale.second * scale.second * scale.inner.third


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.scales = [self.scale]
        self.linear, self.body = nn.Linear(2, 2), Body(self.scale)

    def forward(self, x):
        x = self.linear(x) * SETTINGS.first * Scale.first * self.scale.first * len(self.scales)
        return self.body(x)


OWNERS = {"module": SETTINGS, "class": Scale, "inner class": Inner}


@pytest.mark.parametrize("owner", OWNERS)
def test_an_entry_that_a_second_function_names_is_guarded(owner, monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    holder, name = OWNERS[owner], "third" if owner == "inner class" else "second"
    model, x = Model(), torch.ones(2, 2)
    guards = capture_forward(model, (x,), {}).guards
    assert guards.hold()
    monkeypatch.setattr(holder, name, 5.0)
    assert f".{name} " in str(guards.broken())


def test_a_step_follows_such_an_entry(monkeypatch):
    model, x = Model(), torch.ones(2, 2)
    made = autopar.compile(model, loss_fn=nn.functional.mse_loss)
    first = float(made.step(x, 0 * x))
    monkeypatch.setattr(SETTINGS, "second", 6.0)  # three times as much, and squared
    assert float(made.step(x, 0 * x)) == pytest.approx(9 * first)


class Importing(nn.Module):
    def forward(self, x):
        import settings_of_a_script

        return x * settings_of_a_script.second


class ImportingName(nn.Module):
    def forward(self, x):
        from settings_of_a_script import second

        return x * second


@pytest.mark.parametrize("kind", [Importing, ImportingName])
def test_what_a_function_reads_of_a_module_that_it_imports_is_guarded(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, SETTINGS.__name__, SETTINGS)
    guards = capture_forward(kind(), (torch.ones(2),), {}).guards
    assert guards.hold()
    monkeypatch.setattr(SETTINGS, "second", 5.0)
    assert "settings_of_a_script.second" in str(guards.broken())


def test_equal_functions_of_two_files_are_guarded_each(monkeypatch):
    text, spaces = "RATE = 2.0\ndef rated(x):\n    return x * RATE", ({}, {})
    for name, space in zip(("one.py", "other.py"), spaces, strict=True):
        exec(compile(text, name, "exec"), space)
    first, second = (space["rated"] for space in spaces)
    assert first.__code__ == second.__code__

    class Both(nn.Module):
        def forward(self, x):
            return second(first(x))

    guards = capture_forward(Both(), (torch.ones(2),), {}).guards
    assert guards.hold()
    monkeypatch.setitem(spaces[1], "RATE", 5.0)
    assert "the global RATE" in str(guards.broken())


def test_imports_have_full_names():
    code = compile("import xml.dom as d\nfrom . import reads\nfrom ..ops import nodes", "", "exec")
    found = [name for name, _ in imports_of(code, "autopar.capture")]
    assert found == ["xml.dom", "autopar.capture", "autopar.ops"]


class Widths(NamedTuple):
    width: int
    rate = 2.0

    def scaled(self, x):
        return x * self.rate


class Count(int):
    rate = 2.0


class Kind(enum.Enum):
    ONE = 1

    def __init__(self, value):
        self.own = 2.0


class Rates(list):
    rate = 2.0


class Table(dict):
    rate = 2.0


def scaled(x, setting):
    return x * setting.rate


class OfSetting(nn.Module):
    def __init__(self, setting):
        super().__init__()
        self.setting, self.settings = setting, [(1, setting)]

    def forward(self, x):
        return x * self.setting.rate


class OfElement(OfSetting):
    def forward(self, x):
        return x * self.settings[0][1].rate


class OfArgument(OfSetting):
    def forward(self, x):
        return scaled(x, self.setting)


WIDTHS = Widths(3)


class OfDefault(OfSetting):
    def forward(self, x, setting=WIDTHS):
        return x * setting.rate


class OfText(OfSetting):
    def forward(self, x):
        return x * getattr(self.setting, "rate")  # noqa: B009


class OfMethod(OfSetting):
    def forward(self, x):
        return self.setting.scaled(x)


class OfOwn(OfSetting):
    def forward(self, x):
        return x * self.setting.own


def with_own(value):
    value.own = 2.0
    return value


SETTINGS_READ = {
    "named tuple": (OfSetting, Widths(3), Widths, "rate"),
    "element": (OfElement, Widths(3), Widths, "rate"),
    "argument": (OfArgument, Widths(3), Widths, "rate"),
    "argument that is an object": (OfArgument, type("Held", (), {"rate": 2.0})(), None, "rate"),
    "default": (OfDefault, Widths(3), Widths, "rate"),
    "name in a text": (OfText, Widths(3), Widths, "rate"),
    "method": (OfMethod, Widths(3), Widths, "rate"),
    "number": (OfSetting, Count(3), Count, "rate"),
    "number with an attribute": (OfOwn, with_own(Count(3)), "value", "own"),
    "member of an enum": (OfOwn, Kind.ONE, "value", "own"),
    "list": (OfSetting, Rates([1]), Rates, "rate"),
    "list with an attribute": (OfOwn, with_own(Rates([1])), "value", "own"),
    "dict": (OfSetting, Table(a=1), Table, "rate"),
    "dict with an attribute": (OfOwn, with_own(Table(a=1)), "value", "own"),
}


@pytest.mark.parametrize("name", SETTINGS_READ)
def test_attributes_of_numbers_and_containers_and_of_their_classes_are_guarded(name, monkeypatch):
    kind, value, holder, attribute = SETTINGS_READ[name]
    guards = capture_forward(kind(value), (torch.ones(2),), {}).guards
    assert guards.hold()
    holder = {None: type(value), "value": value}.get(holder, holder)
    monkeypatch.setattr(holder, attribute, 5.0)
    assert f".{attribute} " in str(guards.broken())


@pytest.mark.parametrize("kind", [Count, Rates, Table])
def test_an_equal_value_with_another_attribute_is_another_value(kind):
    model = OfOwn(with_own(kind()))
    guards = capture_forward(model, (torch.ones(2),), {}).guards
    model.setting = kind()
    model.setting.own = 5.0
    assert "model.setting" in str(guards.broken())


class Mode(enum.Flag):
    ONE, TWO, FOUR = 1, 2, 4


class OfModes(nn.Module):
    def forward(self, x):
        return 2 * x if Mode.ONE & (Mode.ONE | Mode.FOUR) else x


def test_an_enum_may_keep_the_combinations_of_its_members():
    assert capture_forward(OfModes(), (torch.ones(2),), {}).guards.hold()


class Defaults:
    rate = 2.0

    def apply(self, x):
        return x * self.rate


class Chosen(Defaults):
    pass


class Named(NamedTuple):
    size: float = 1.0
    rate = 2.0

    def apply(self, x):
        return x * self.rate


class ChosenNamed(Named):
    pass


class Scaled(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.values = [value]

    def forward(self, x):
        return self.values[0].apply(x) * self.values[0].rate


CHOSEN, NAMED = Chosen(), ChosenNamed()


@pytest.mark.parametrize("name", ["rate", "apply"])
@pytest.mark.parametrize(("value", "holder"), [(CHOSEN, CHOSEN), (CHOSEN, Chosen), (NAMED, ChosenNamed)])
def test_what_would_hide_an_entry_of_a_class_is_guarded(value, holder, name, monkeypatch):
    """Attributes of an object hide those of its class, and entries of a class those of the classes above it."""
    guards = capture_forward(Scaled(value), (torch.ones(2),), {}).guards
    assert guards.hold()
    monkeypatch.setattr(holder, name, 5.0, raising=False)
    assert f".{name} " in str(guards.broken())


class Computed(Defaults):
    @cached_property
    def rate(self):
        return 2.0


def test_an_object_may_keep_what_it_computes_once():
    value = Computed()
    guards = capture_forward(Scaled(value), (torch.ones(2),), {}).guards
    assert value.rate == 2.0
    assert guards.hold()


@torch.fx.wrap
def wrapped_scale(x, factor):
    return x * factor


class Scaling(nn.Module):
    def forward(self, x):
        return wrapped_scale(x, 2.0)


def test_a_function_that_torch_fx_wraps_for_the_time_of_a_trace_has_not_changed(monkeypatch):
    guards = capture_forward(Scaling(), (torch.ones(2),), {}).guards
    assert guards.broken() is None
    monkeypatch.setattr(sys.modules[__name__], "wrapped_scale", lambda x, factor: x + factor)
    assert "wrapped_scale" in guards.broken().words
