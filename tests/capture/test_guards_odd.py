"""Scripts that read and write Python state in odd ways: each equals the plain run, or is refused by its line."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import os
import random
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError
from tests.support.scripts import Scaled, both, line_of, refusal, squares


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Kind(enum.Enum):
    SOFT = 1
    HARD = 2


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    nested: Any = None


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Reading(Scaled):
    """A model whose factor is a function of itself."""

    def __init__(self, factor: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.factor = factor
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor(self)


class OnClass(Scaled):
    scale: ClassVar[float] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ByProperty(Scaled):
    @property
    def scale(self) -> float:
        return self.beta * 2


class Probing(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * self.extra if hasattr(self, "extra") else out


SETTINGS = types.SimpleNamespace(scale=1.0)
LIBRARY = types.ModuleType("library")
LIBRARY.scale = 1.0  # type: ignore[attr-defined]
NUMBER = 1.0
OPTIONS = Options()


def by_global(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * NUMBER


def by_namespace(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * SETTINGS.scale


def by_module(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * LIBRARY.scale


def by_own_attribute(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * by_own_attribute.scale  # type: ignore[attr-defined]


by_own_attribute.scale = 1.0  # type: ignore[attr-defined]


def by_environment(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * float(os.environ.get("AUTOPAR_TEST_SCALE", "1"))


def by_helper(out: Tensor, y: Tensor) -> Tensor:
    return helper(out, y)


def helper(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * OPTIONS.scale


class Weighted:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return squares(out, y) * self.scale

    def method(self, out: Tensor, y: Tensor) -> Tensor:
        return squares(out, y) * self.scale


def put(holder: Any, name: str = "scale") -> Callable[[nn.Module, int], None]:
    """Sets an attribute twice in five steps."""

    def between(model: nn.Module, i: int) -> None:
        if i in (0, 2, 4):
            target = model if holder is None else holder
            setattr(target, name, 1.0 + 0.5 * (i % 4))

    return between


def entry(of: Callable[[Any], Any], key: Any, values: Any = (1.0, 2.0, 0.5)) -> Any:
    """Sets an entry of something of the model's twice in five steps."""

    def between(model: nn.Module, i: int) -> None:
        if i in (0, 2, 4):
            of(model)[key] = values[i // 2]

    return between


def swap(name: str, values: Any) -> Any:
    """Sets an attribute of the model to one value after another."""
    return lambda model, i: setattr(model, name, values[i // 2]) if i % 2 == 0 else None


TABLE: dict[str, Any] = {"a": {"b": [1.0]}}
QUEUE = collections.deque([1.0, 2.0], maxlen=2)
weighted, weighted_method = Weighted(), Weighted()
partial_options = {"scale": 1.0}


def partial_loss(out: Tensor, y: Tensor, options: Any = None) -> Tensor:
    return squares(out, y) * options["scale"]


def nonlocal_maker() -> tuple[Callable[..., Tensor], Callable[[nn.Module, int], None]]:
    weight = 1.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return squares(out, y) * weight

    def between(model: nn.Module, i: int) -> None:
        nonlocal weight
        weight = 1.0 + i // 2

    return loss, between


loss_in_cell, between_cell = nonlocal_maker()


def set_number(model: nn.Module, i: int) -> None:
    global NUMBER
    NUMBER = 1.0 + i // 2


def set_environment(model: nn.Module, i: int) -> None:
    os.environ["AUTOPAR_TEST_SCALE"] = str(1.0 + i // 2)


def freeze(model: Any, i: int) -> None:
    model.body.requires_grad_(i < 2 or i == 4)


def halves(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 0.5


def doubles(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


handles: list[Any] = []


def hook_later(model: Any, i: int) -> None:
    if i == 2:
        handles.append(model.body.register_forward_hook(halves))
    if i == 4:
        handles.pop().remove()


def pre_hook_later(model: Any, i: int) -> None:
    if i == 2:
        model.body.register_forward_pre_hook(doubles)


def patch_forward(model: Any, i: int) -> None:
    if i == 2:
        model.forward = types.MethodType(lambda self, x: self.head(x), model)


def tie(model: Any, i: int) -> None:
    if i == 2:
        model.body.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))


def append_layer(model: Any, i: int) -> None:
    if i == 2:
        torch.manual_seed(3)
        model.append(nn.Linear(3, 3).double())


def alias(model: Any, i: int) -> None:
    """The script holds the list itself, and the model must too."""
    if i == 0:
        ALIASED[:] = [1.0]
        model.factors = ALIASED
    ALIASED[0] = 1.0 + i // 2


ALIASED = [1.0]

EQUAL: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "dataclass": (
        lambda: Reading(lambda m: m.o.scale, o=Options()),
        squares,
        lambda m, i: setattr(m.o, "scale", 1.0 + i // 2),
    ),
    "nested object": (
        lambda: Reading(lambda m: m.o.nested.scale, o=Options(nested=Options())),
        squares,
        lambda m, i: setattr(m.o.nested, "scale", 1.0 + i // 2),
    ),
    "slots": (
        lambda: Reading(lambda m: m.o.scale, o=Slotted()),
        squares,
        lambda m, i: setattr(m.o, "scale", 1.0 + i // 2),
    ),
    "class attribute": (OnClass, squares, put(OnClass)),
    "class attribute shadowed": (OnClass, squares, put(None)),
    "attribute that appears": (
        Probing,
        squares,
        lambda m, i: setattr(m, "extra", 2.0) if i == 2 else None,
    ),
    "enum": (
        lambda: Reading(lambda m: 2.0 if m.kind is Kind.HARD else 1.0),
        squares,
        swap("kind", [Kind.SOFT, Kind.HARD, Kind.SOFT]),
    ),
    "string mode": (
        lambda: Reading(lambda m: 2.0 if m.mode == "hard" else 1.0),
        squares,
        swap("mode", ["soft", "hard", "soft"]),
    ),
    "bool flag": (
        lambda: Reading(lambda m: 2.0 if m.flag else 1.0),
        squares,
        swap("flag", [True, False, True]),
    ),
    "None to number": (
        lambda: Reading(lambda m: m.maybe or 1.0),
        squares,
        swap("maybe", [None, 2.0, None]),
    ),
    "tuple": (
        lambda: Reading(lambda m: m.pair[1]),
        squares,
        swap("pair", [(1.0, 2.0), (1.0, 3.0), (1.0, 2.0)]),
    ),
    "dict entry": (
        lambda: Reading(lambda m: m.table["s"], table={"s": 1.0}),
        squares,
        entry(lambda m: m.table, "s"),
    ),
    "dict iteration": (
        lambda: Reading(lambda m: sum(m.table.values()), table={"s": 1.0}),
        squares,
        lambda m, i: m.table.setdefault(str(i // 2), 0.5),
    ),
    "set": (
        lambda: Reading(lambda m: float(len(m.seen)), seen={0}),
        squares,
        lambda m, i: m.seen.add(i // 2),
    ),
    "list of lists": (
        lambda: Reading(lambda m: m.rows[0][0], rows=[[1.0]]),
        squares,
        entry(lambda m: m.rows[0], 0),
    ),
    "nested global table": (
        lambda: Reading(lambda m: TABLE["a"]["b"][0]),
        squares,
        entry(lambda m: TABLE["a"]["b"], 0),
    ),
    "deque": (
        lambda: Reading(lambda m: sum(QUEUE)),
        squares,
        lambda m, i: QUEUE.extend((1.0, 1.0 + i // 2)),
    ),
    "numpy array": (
        lambda: Reading(lambda m: float(m.a[0]), a=np.ones(2)),
        squares,
        entry(lambda m: m.a, 0),
    ),
    "numpy number": (
        lambda: Reading(lambda m: float(m.a)),
        squares,
        swap("a", [np.float64(1), np.float64(2), np.float64(1)]),
    ),
    "list alias": (lambda: Reading(lambda m: m.factors[0]), squares, alias),
    "tensors in a list": (
        lambda: Reading(lambda m: m.ts[0], ts=[torch.tensor(1.0)]),
        squares,
        lambda m, i: m.ts[0].fill_(1.0 + i // 2),
    ),
    "tensor replaced in a dict": (
        lambda: Reading(lambda m: m.ts["a"], ts={}),
        squares,
        lambda m, i: m.ts.update(a=torch.tensor(1.0 + i // 2)),
    ),
    "function attribute of the model": (
        lambda: Reading(lambda m: 1.0),
        squares,
        swap("factor", [lambda m: 1.0, lambda m: 2.0, lambda m: 3.0]),
    ),
    "activation": (
        lambda: Reading(lambda m: m.act(torch.ones((), dtype=torch.float64))),
        squares,
        swap("act", [torch.sigmoid, torch.tanh, torch.relu]),
    ),
    "property": (lambda: ByProperty(), squares, put(None, "beta")),
    "global number": (Scaled, by_global, set_number),
    "global namespace": (Scaled, by_namespace, put(SETTINGS)),
    "attribute of a module": (Scaled, by_module, put(LIBRARY)),
    "attribute of the loss function": (Scaled, by_own_attribute, put(by_own_attribute)),
    "global of a helper": (Scaled, by_helper, put(OPTIONS)),
    "environment": (Scaled, by_environment, set_environment),
    "loss object": (Scaled, weighted, put(weighted)),
    "method of an object": (Scaled, weighted_method.method, put(weighted_method)),
    "nonlocal of the loss": (Scaled, loss_in_cell, between_cell),
    "functools.partial": (
        Scaled,
        functools.partial(partial_loss, options=partial_options),
        put(None, "unread"),
    ),
    "entry of a partial's argument": (
        Scaled,
        functools.partial(partial_loss, options=partial_options),
        entry(lambda m: partial_options, "scale"),
    ),
    "frozen parameters": (Scaled, squares, freeze),
    "train and eval": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        squares,
        lambda m, i: m.train(i != 2),
    ),
    "eval of one layer": (
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        squares,
        lambda m, i: m[0].train(i != 2),
    ),
    "eps": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
        squares,
        lambda m, i: setattr(m[0], "eps", 1e-5 + i // 2),
    ),
    "slope": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1)),
        squares,
        lambda m, i: setattr(m[1], "negative_slope", 0.1 + i // 2),
    ),
    "forward hook added and removed": (Scaled, squares, hook_later),
    "forward pre-hook added": (Scaled, squares, pre_hook_later),
    "forward replaced": (Scaled, squares, patch_forward),
    "parameter replaced": (Scaled, squares, tie),
    "layer appended": (lambda: nn.Sequential(nn.Linear(4, 3)), squares, append_layer),
    "activation module replaced": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        squares,
        lambda m, i: m.__setitem__(1, nn.ReLU()) if i == 2 else None,
    ),
    "attribute that nothing reads": (Scaled, squares, put(None, "unread")),
    "loss module": (Scaled, nn.SmoothL1Loss(), lambda m, i: None),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_a_script_trains_as_it_does_plainly(kind: str) -> None:
    make, loss_fn, between = EQUAL[kind]
    found, plain = both(make, loss_fn, between)
    assert found == plain


class Clocked(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + time.time() % 1)


class Choosing(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([1.0, 2.0])


class Shuffling(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        order = np.random.permutation(4)
        return super().forward(x[:, torch.from_numpy(order)])


class Iterating(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.source = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.source)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Generating(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.own.random()


SEEN: list[Any] = []
CACHE: dict[str, Any] = {}
COUNT = 0


class IntoGlobal(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.mean())
        return super().forward(x)


class IntoCache(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        CACHE["last"] = x
        return super().forward(x)


class GlobalCounter(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().forward(x)


class IntoObject(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.box = Options()

    def forward(self, x: Tensor) -> Tensor:
        self.box.scale = x.mean()
        return super().forward(x)


class IntoSubmodule(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.body.seen = x
        return super().forward(x)


class Deleting(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "first"):
            del self.first
        return super().forward(x)


class Yielding(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.scales: Iterator[float] = iter([1.0] * 10)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)


REFUSED = [
    (Clocked, "time.time()", "reads the clock"),
    (Choosing, "random.choice", "draws from Python's"),
    (Shuffling, "np.random.permutation", "draws from Python's or numpy's"),
    (Iterating, "next(self.source)", "reads the count model.source"),
    (Generating, "self.own.random()", "draws from Python's"),
    (IntoGlobal, "SEEN.append", "changes the global SEEN"),
    (IntoCache, "CACHE[", "changes the global CACHE"),
    (GlobalCounter, "COUNT += 1", "changes the global COUNT"),
    (IntoObject, "self.box.scale", "changes model.box.scale"),
    (IntoSubmodule, "self.body.seen", "sets model.body.seen"),
    (Deleting, "del self.first", "deletes model.first"),
    (Yielding, "next(self.scales)", "reads the list_iterator model.scales"),
]


@pytest.mark.parametrize(
    ("make", "text", "said"), REFUSED, ids=lambda x: getattr(x, "__name__", "")
)
def test_what_cannot_be_followed_is_refused_by_its_line(make: Any, text: str, said: str) -> None:
    message = refusal(make)
    assert said in message and line_of(make, text) in message


def backward_hook(model: Any, kind: str) -> None:
    if kind == "parameter":
        model.body.weight.register_hook(lambda g: g * 2)
    elif kind == "accumulated":
        model.body.weight.register_post_accumulate_grad_hook(lambda p: None)
    else:
        model.body.register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize("kind", ["parameter", "accumulated", "module"])
@pytest.mark.parametrize("step", [0, 2])
def test_backward_hooks_are_refused_by_their_line(kind: str, step: int) -> None:
    def make() -> nn.Module:
        return Scaled()

    def between(model: nn.Module, i: int) -> None:
        if i == step:
            backward_hook(model, kind)

    with pytest.raises(CaptureError, match=r"test_guards_odd.py:\d+"):
        both(make, lambda out, y: F.mse_loss(out, y), between)
