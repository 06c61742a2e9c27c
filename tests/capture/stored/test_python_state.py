"""The state of Python as text: equal for equal scripts, different where a forward could read a difference."""

import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.guards.guards import Place
from autopar.capture.stored.python_state import NoText, PythonState

SCRIPT = """
    import collections, dataclasses, enum, functools, typing
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Kind(enum.Enum):
        SOFT = 0.5

        def times(self):
            return 3

    @dataclasses.dataclass
    class Options:
        rate: float = 0.25

        @property
        def twice(self):
            return 2 * self.rate

    class Slotted:
        __slots__ = ("depth",)

        def __init__(self):
            self.depth = 5

    class Mixin:
        width = 7

        @staticmethod
        def shown(x):
            return x - 11

        @classmethod
        def made(cls, x):
            return x - 13

    Point = collections.namedtuple("Point", ["left"])

    class Size(typing.NamedTuple):
        rows: int
        unit = 73

    class Rate(float):
        unit = 79

    RATE = Rate(0.5)
    RATE.base = 83

    @torch.no_grad()
    def quiet(x):
        return x * 17

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def cast(x):
        return x @ x

    def wrapped(function):
        @functools.wraps(function)
        def called(*args, scale=19):
            return function(*args) * scale
        return called

    @wrapped
    def inner(x):
        return x / 23

    def default(x, by=29, *, then=31):
        return x * by * then

    ARRAY = np.array([37.0])
    NAMES = {"up", "down"}
    FACTORIES = collections.defaultdict(lambda: 41)
    PART = functools.partial(default, by=43)
    HALF = torch.tensor([47.0])

    class Model(nn.Module, Mixin):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.register_buffer("mask", torch.ones(4))
            self.options, self.slotted, self.kind = Options(), Slotted(), Kind.SOFT
            self.nested, self.point = {"a": [1, {"b": 53}]}, Point(59)
            self.sizes, self.rate = (Size(1),), RATE
            self.call = self.method
            self.first.register_forward_hook(lambda module, args, result: result * 61)
            self.drop = nn.Dropout(0.67)

        def method(self, x):
            return x * 71

        def forward(self, x):
            y = quiet(self.drop(self.first(x))) + cast(x) + inner(x) + default(x) + PART(x)
            y = y * self.options.twice * self.slotted.depth * self.kind.value * self.width
            y = self.shown(y) + self.made(y) + float(ARRAY[0]) * len(NAMES) + FACTORIES[0] * HALF
            return F.gelu(self.call(y)) * self.nested["a"][0] + self.point.left
"""
EDITS = {
    "a member of an enum": ("SOFT = 0.5", "SOFT = 0.75"),
    "a method of an enum": ("return 3\n", "return 4\n"),
    "a default of a dataclass": ("rate: float = 0.25", "rate: float = 0.5"),
    "a property": ("return 2 * self.rate", "return 3 * self.rate"),
    "a slot": ("self.depth = 5", "self.depth = 6"),
    "an attribute of a base class": ("width = 7", "width = 8"),
    "a static method": ("x - 11", "x - 12"),
    "a class method": ("x - 13", "x - 14"),
    "code under no_grad": ("x * 17", "x * 18"),
    "a decorator": ("@torch.no_grad()", "@torch.enable_grad()"),
    "a decorator's argument": ("dtype=torch.bfloat16", "dtype=torch.float16"),
    "code of a decorator": ("function(*args) * scale", "function(*args) + scale"),
    "a default of a decorator": ("scale=19", "scale=20"),
    "decorated code": ("x / 23", "x / 24"),
    "a default": ("by=29", "by=30"),
    "a default of a keyword": ("then=31", "then=32"),
    "an array": ("[37.0]", "[38.0]"),
    "a set": ('{"up", "down"}', '{"up", "left"}'),
    "a factory": ("lambda: 41", "lambda: 42"),
    "an argument of a partial": ("by=43", "by=44"),
    "a tensor of a global": ("[47.0]", "[48.0]"),
    "an element deep inside": ('"b": 53', '"b": 54'),
    "a key": ('"b": 53', '"c": 53'),
    "a named tuple": ("Point(59)", "Point(60)"),
    "a class of a named tuple": ("unit = 73", "unit = 74"),
    "a class of a number": ("unit = 79", "unit = 80"),
    "an attribute of a number": ("RATE.base = 83", "RATE.base = 84"),
    "a hook": ("result * 61", "result * 62"),
    "the rate of a dropout": ("nn.Dropout(0.67)", "nn.Dropout(0.68)"),
    "a bound method": ("x * 71", "x * 72"),
    "another method": ("self.call = self.method", "self.call = self.made"),
    "a width": ("nn.Linear(4, 4, bias", "nn.Linear(4, 8, bias"),
    "a bias": (", bias=False", ""),
    "a class of a module": ("nn.Dropout(0.67)", "nn.AlphaDropout(0.67)"),
    "a dtype of a buffer": ("torch.ones(4)", "torch.ones(4, dtype=torch.float64)"),
    "a type of a number": ("return x * 71", "return x * 71.0"),
    "the line": ("def method", "\n        def method"),
    "a sign of zero": ("SOFT = 0.5", "SOFT = -0.0"),
}


def loaded(text: str = SCRIPT) -> types.ModuleType:
    """A module of a script's text, as a process of its own imports it."""
    module = types.ModuleType("script_of_a_user")
    module.__file__ = "/a/folder/script_of_a_user.py"
    sys.modules[module.__name__] = module
    exec(compile(textwrap.dedent(text), module.__file__, "exec"), vars(module))
    return module


def model_of(text: str = SCRIPT) -> nn.Module:
    torch.manual_seed(0)
    model = loaded(text).Model()
    return model.to("meta")  # the values of parameters are not part of the state


@pytest.fixture(autouse=True)
def _forget():
    yield
    sys.modules.pop("script_of_a_user", None)


def state(model, **others):
    found = PythonState({"model": model} | others)
    assert not found.obstacle
    return found


def test_equal_scripts_have_equal_states():
    digests = {state(model_of()).digest for _ in range(3)}
    assert len(digests) == 1


@pytest.mark.parametrize("name", EDITS)
def test_a_script_that_differs_has_another_state(name):
    old, new = EDITS[name]
    assert old in SCRIPT
    assert state(model_of()).digest != state(model_of(SCRIPT.replace(old, new))).digest


def tie(model):
    model.second.weight = model.first.weight


def freeze(model):
    model.second.requires_grad_(False)


def reorder(model):
    first = model._modules.pop("first")
    model.first = first


def alias(model):
    model.options.other = model.nested


def copy(model):
    model.options.other = {"a": [1, {"b": 53}]}


CHANGES = {
    "one list twice": alias,
    "equal lists": copy,
    "tied parameters": tie,
    "a frozen parameter": freeze,
    "another order of modules": reorder,
    "a mode": lambda model: model.drop.eval(),
    "a missing attribute": lambda model: delattr(model.options, "rate"),
    "one more attribute": lambda model: setattr(model, "more", 1),
    "an own forward": lambda model: setattr(model.drop, "forward", torch.relu),
    "a hook that is gone": lambda model: model.first._forward_hooks.clear(),
}


def test_a_changed_model_has_another_state():
    digests = {"as it was": state(model_of()).digest}
    for name, change in CHANGES.items():
        model = model_of()
        change(model)
        digests[name] = state(model).digest
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("owner", [F, torch, torch.Tensor, nn.Dropout])
def test_a_function_in_the_place_of_one_of_torch_is_seen(owner, monkeypatch):
    before = state(model_of()).digest
    name, other = {F: ("gelu", F.silu), torch: ("add", torch.mul), torch.Tensor: ("float", None)}.get(
        owner, ("forward", nn.Identity.forward)
    )
    monkeypatch.setattr(owner, name, other or torch.Tensor.norm)
    assert state(model_of()).digest != before


def test_what_was_read_is_found_by_its_number_in_another_process():
    first = model_of()
    here, there = state(first), None
    place = Place(vars(first), "options", "model.options", "a line")
    number, is_space = here.address(place)
    second = model_of()
    there = state(second)
    assert there.holder(number, is_space) is vars(second)
    module = sys.modules["script_of_a_user"]
    number, is_space = there.address(Place(vars(module.Mixin), "width", "Mixin.width", "a line"))
    assert dict(there.holder(number, is_space)) == dict(vars(module.Mixin))


def test_what_is_out_of_reach_has_no_address():
    model, other = model_of(), {"x": 1}
    with pytest.raises(NoText, match="can be another one at every start"):
        state(model).address(Place(other, "x", "other.x", "a line"))
    space = vars(sys.modules["script_of_a_user"])
    with pytest.raises(NoText, match="wrapped"):  # a global that no code of the model names
        state(model).address(Place(space, "wrapped", "the global wrapped", "a line"))


def test_what_has_no_text_has_no_address_but_does_no_harm():
    import threading

    model = model_of()
    model.lock, model.locks = threading.Lock(), [threading.Lock()]
    found = state(model)
    for name in ("lock", "locks"):
        with pytest.raises(NoText, match="can be another one"):
            found.address(Place(vars(model), name, f"model.{name}", "a line"))
    assert found.address(Place(vars(model), "options", "model.options", "a line"))


def test_a_compiled_module_is_an_obstacle():
    model = model_of()
    model.drop = torch.jit.script(nn.Dropout())
    assert "generated code" in PythonState({"model": model}).obstacle
    model.drop = torch.fx.symbolic_trace(nn.ReLU())
    assert "generated code" in PythonState({"model": model}).obstacle


def test_results_that_a_function_keeps_are_an_obstacle():
    text = SCRIPT.replace("@wrapped", "@functools.cache")
    module = loaded(text)
    model = module.Model().to("meta")
    assert not PythonState({"model": model}).obstacle
    module.inner(2.0)
    assert "keeps results" in PythonState({"model": model}).obstacle
