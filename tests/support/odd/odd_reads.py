"""Scripts that change, between steps, Python values which forward or the loss reads."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.scripts import Scaled, Script, squares


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

READS = {
    "dataclass": Script(
        lambda: Reading(lambda m: m.o.scale, o=Options()), squares, lambda m, i: setattr(m.o, "scale", 1.0 + i // 2)
    ),
    "nested object": Script(
        lambda: Reading(lambda m: m.o.nested.scale, o=Options(nested=Options())),
        squares,
        lambda m, i: setattr(m.o.nested, "scale", 1.0 + i // 2),
    ),
    "slots": Script(
        lambda: Reading(lambda m: m.o.scale, o=Slotted()), squares, lambda m, i: setattr(m.o, "scale", 1.0 + i // 2)
    ),
    "class attribute": Script(OnClass, squares, put(OnClass)),
    "class attribute shadowed": Script(OnClass, squares, put(None)),
    "attribute that appears": Script(Probing, squares, lambda m, i: setattr(m, "extra", 2.0) if i == 2 else None),
    "enum": Script(
        lambda: Reading(lambda m: 2.0 if m.kind is Kind.HARD else 1.0),
        squares,
        swap("kind", [Kind.SOFT, Kind.HARD, Kind.SOFT]),
    ),
    "string mode": Script(
        lambda: Reading(lambda m: 2.0 if m.mode == "hard" else 1.0), squares, swap("mode", ["soft", "hard", "soft"])
    ),
    "bool flag": Script(lambda: Reading(lambda m: 2.0 if m.flag else 1.0), squares, swap("flag", [True, False, True])),
    "None to number": Script(lambda: Reading(lambda m: m.maybe or 1.0), squares, swap("maybe", [None, 2.0, None])),
    "tuple": Script(lambda: Reading(lambda m: m.pair[1]), squares, swap("pair", [(1.0, 2.0), (1.0, 3.0), (1.0, 2.0)])),
    "dict entry": Script(
        lambda: Reading(lambda m: m.table["s"], table={"s": 1.0}), squares, entry(lambda m: m.table, "s")
    ),
    "dict iteration": Script(
        lambda: Reading(lambda m: sum(m.table.values()), table={"s": 1.0}),
        squares,
        lambda m, i: m.table.setdefault(str(i // 2), 0.5),
    ),
    "set": Script(lambda: Reading(lambda m: float(len(m.seen)), seen={0}), squares, lambda m, i: m.seen.add(i // 2)),
    "list of lists": Script(
        lambda: Reading(lambda m: m.rows[0][0], rows=[[1.0]]), squares, entry(lambda m: m.rows[0], 0)
    ),
    "nested global table": Script(
        lambda: Reading(lambda m: TABLE["a"]["b"][0]), squares, entry(lambda m: TABLE["a"]["b"], 0)
    ),
    "deque": Script(lambda: Reading(lambda m: sum(QUEUE)), squares, lambda m, i: QUEUE.extend((1.0, 1.0 + i // 2))),
    "numpy array": Script(lambda: Reading(lambda m: float(m.a[0]), a=np.ones(2)), squares, entry(lambda m: m.a, 0)),
    "numpy number": Script(
        lambda: Reading(lambda m: float(m.a)), squares, swap("a", [np.float64(1), np.float64(2), np.float64(1)])
    ),
    "list alias": Script(lambda: Reading(lambda m: m.factors[0]), squares, alias),
    "tensors in a list": Script(
        lambda: Reading(lambda m: m.ts[0], ts=[torch.tensor(1.0)]), squares, lambda m, i: m.ts[0].fill_(1.0 + i // 2)
    ),
    "tensor replaced in a dict": Script(
        lambda: Reading(lambda m: m.ts["a"], ts={}), squares, lambda m, i: m.ts.update(a=torch.tensor(1.0 + i // 2))
    ),
    "function attribute of the model": Script(
        lambda: Reading(lambda m: 1.0), squares, swap("factor", [lambda m: 1.0, lambda m: 2.0, lambda m: 3.0])
    ),
    "activation": Script(
        lambda: Reading(lambda m: m.act(torch.ones((), dtype=torch.float64))),
        squares,
        swap("act", [torch.sigmoid, torch.tanh, torch.relu]),
    ),
    "property": Script(lambda: ByProperty(), squares, put(None, "beta")),
    "global number": Script(Scaled, by_global, set_number),
    "global namespace": Script(Scaled, by_namespace, put(SETTINGS)),
    "attribute of a module": Script(Scaled, by_module, put(LIBRARY)),
    "attribute of the loss function": Script(Scaled, by_own_attribute, put(by_own_attribute)),
    "global of a helper": Script(Scaled, by_helper, put(OPTIONS)),
    "environment": Script(Scaled, by_environment, set_environment),
    "loss object": Script(Scaled, weighted, put(weighted)),
    "method of an object": Script(Scaled, weighted_method.method, put(weighted_method)),
    "nonlocal of the loss": Script(Scaled, loss_in_cell, between_cell),
    "functools.partial": Script(Scaled, functools.partial(partial_loss, options=partial_options), put(None, "unread")),
    "entry of a partial's argument": Script(
        Scaled, functools.partial(partial_loss, options=partial_options), entry(lambda m: partial_options, "scale")
    ),
    "frozen parameters": Script(Scaled, squares, freeze),
    "train and eval": Script(
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), squares, lambda m, i: m.train(i != 2)
    ),
    "eval of one layer": Script(
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), squares, lambda m, i: m[0].train(i != 2)
    ),
    "eps": Script(
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
        squares,
        lambda m, i: setattr(m[0], "eps", 1e-5 + i // 2),
    ),
    "slope": Script(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1)),
        squares,
        lambda m, i: setattr(m[1], "negative_slope", 0.1 + i // 2),
    ),
    "forward hook added and removed": Script(Scaled, squares, hook_later),
    "forward pre-hook added": Script(Scaled, squares, pre_hook_later),
    "forward replaced": Script(Scaled, squares, patch_forward),
    "parameter replaced": Script(Scaled, squares, tie),
    "layer appended": Script(lambda: nn.Sequential(nn.Linear(4, 3)), squares, append_layer),
    "activation module replaced": Script(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
        squares,
        lambda m, i: m.__setitem__(1, nn.ReLU()) if i == 2 else None,
    ),
    "attribute that nothing reads": Script(Scaled, squares, put(None, "unread")),
    "loss module": Script(Scaled, nn.SmoothL1Loss(), lambda m, i: None),
}
