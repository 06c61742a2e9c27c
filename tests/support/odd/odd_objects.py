"""Scripts whose forward reads state through Python's machinery: descriptors, weak references, contexts, patches."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.odd.odd_reads import Reading
from tests.support.scripts import Scaled, Script, squares


class Stored:
    """A descriptor that keeps the value of every object in a dict of its own."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self.values.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[id(owner)] = value


class Described(Scaled):
    scale: Any = Stored()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Forwarding(Scaled):
    """Finds an attribute that it has not in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        table = self.__dict__.get("table", {})
        return table[name] if name in table else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Holder:
    """An object with a number, which can be referred to weakly."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Weak(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [Holder()]
        self.reference = weakref.ref(self.kept[0])

    def forward(self, x: Tensor) -> Tensor:
        found = self.reference()
        return super().forward(x) * (3.0 if found is None else found.scale)


def lose(model: Any, i: int) -> None:
    """Changes the referred object before step 2, and lets go of it before step 4."""
    if i == 2:
        model.kept[0].scale = 2.0
    if i == 4:
        model.kept.clear()


SCALES: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


class Caching(Scaled):
    @functools.cached_property
    def scale(self) -> float:
        return float(self.beta) + 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def forget(model: Any, i: int) -> None:
    model.beta = 0.5 * i + 0.5
    if i in (2, 4):
        del model.scale


class Yielding(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.source = (1.0 + i for i in range(100))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.source)


LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Mode(enum.Enum):
    SOFT = 1


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 1.0


BOTTOM = {"scale": 1.0}


class Factor:
    """Multiplies by its state, which only its operators read."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __rmul__(self, x: Any) -> Any:
        return x * self.scale

    def __float__(self) -> float:
        return self.scale


class Chain:
    """A sequence with a length and elements of its own."""

    def __init__(self) -> None:
        self.count = 1

    def __iter__(self) -> Iterator[float]:
        return iter([0.5] * self.count)


class Metered(type):
    """A class whose classes have a property."""

    state = 1.0

    @property
    def scale(cls) -> float:
        return cls.state


class Meter(metaclass=Metered):
    pass


class Patched(Scaled):
    """Its forward is patched on the class."""


def twice(model: Any, x: Tensor) -> Tensor:
    return Scaled.forward(model, x) * 2


def patch(model: Any, i: int) -> None:
    """Patches the class before step 2, and takes that back before step 4."""
    if i == 2:
        Patched.forward = twice  # type: ignore[method-assign]
    if i in (0, 4) and "forward" in vars(Patched):
        del Patched.forward


class Switching(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.bend = self.soft

    def soft(self, x: Tensor) -> Tensor:
        return x.tanh()

    def hard(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1) * self.beta

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bend(self.body(x)))


def by_default(out: Tensor, y: Tensor, state: Any = [1.0]) -> Tensor:  # noqa: B006
    return squares(out, y) * state[0]


def set_default(model: Any, i: int) -> None:
    by_default.__defaults__[0][0] = 1.0 + i  # type: ignore[index]


SCALE = 1.0


@functools.lru_cache
def cached_scale() -> float:
    return SCALE


def set_cached(model: Any, i: int) -> None:
    globals()["SCALE"] = 1.0 + i
    if i in (0, 2):
        cached_scale.cache_clear()


def by_cached(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * cached_scale()


@contextlib.contextmanager
def scaled() -> Iterator[float]:
    yield SCALE


def by_context(out: Tensor, y: Tensor) -> Tensor:
    with scaled() as scale:
        return squares(out, y) * scale


class Freezable(Scaled):
    """Asks whether a parameter is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.body.weight.requires_grad else 1.0)


class Buffered(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def unbuffer(model: Any, i: int) -> None:
    """Makes a plain tensor of the buffer before step 2, and a buffer of that before step 4."""
    if i == 2:
        del model.scale
        model.scale = torch.tensor(2.0, dtype=torch.float64)
    if i == 4:
        del model.scale
        model.register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))


def edit_state(model: Any, i: int) -> None:
    """Edits the state that a state dict shares with the model, and loads an edited one."""
    with torch.no_grad():
        if i == 1:
            model.state_dict()["body.weight"].mul_(0.5)
        if i == 3:
            state = {name: x.clone() for name, x in model.state_dict().items()}
            state["head.bias"].add_(0.25)
            model.load_state_dict(state)


class Listed(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


def reorder(model: Any, i: int) -> None:
    if i == 2:
        first, second = model.layers[0], model.layers[1]
        model.layers[0], model.layers[1] = second, first


def copied_head(model: Any, i: int) -> None:
    """Puts a deep copy of its own head into the model before step 2, and changes what it was copied from."""
    if i == 2:
        old, model.head = model.head, copy.deepcopy(model.head)
        with torch.no_grad():
            old.weight.zero_()


class Counted(Scaled):
    """Counts in its dict, past `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        vars(self)["calls"] = self.calls + 1
        return super().forward(x)


class Rounded(Scaled):
    """Rounds what is saved for backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda saved: saved):
            return super().forward(x)


class Damped(Scaled):
    """Halves the gradient of its hidden layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return self.head(hidden)


class ByClass(Scaled):
    """Its class has a method, of which every read makes another object."""

    @classmethod
    def bent(cls, x: Tensor) -> Tensor:
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bent(self.body(x)))


def reading(factor: Callable[[Any], Any], **attributes: Any) -> Callable[[], nn.Module]:
    return lambda: Reading(factor, **attributes)


OBJECTS = {
    "descriptor": Script(Described, between=lambda m, i: setattr(m, "scale", 1.0 + i)),
    "classmethod": Script(ByClass),
    "own __getattr__": Script(Forwarding, between=lambda m, i: m.table.update(scale=1.0 + i)),
    "weak reference": Script(Weak, between=lose, line="self.reference()", cause="reads the weak reference"),
    "weak dict": Script(reading(lambda m: SCALES.get(m, 1.0)), between=lambda m, i: SCALES.update({m: 1.0 + i})),
    "cached property of the model": Script(Caching, between=forget),
    "generator": Script(Yielding, line="next(self.source)", cause="reads the generator"),
    "thread-local value": Script(reading(lambda m: LOCAL.scale), between=lambda m, i: setattr(LOCAL, "scale", 1.0 + i)),
    "context variable": Script(reading(lambda m: CONTEXT.get()), between=lambda m, i: CONTEXT.set(1.0 + i)),
    "attribute of an enum": Script(
        reading(lambda m: m.mode.scale, mode=Mode.SOFT), between=lambda m, i: setattr(Mode.SOFT, "scale", 1.0 + i)
    ),
    "frozen dataclass replaced": Script(
        reading(lambda m: m.config.scale, config=Config()),
        between=lambda m, i: setattr(m, "config", dataclasses.replace(m.config, scale=1.0 + i)),
    ),
    "chain of dicts": Script(
        reading(lambda m: m.chain["scale"], chain=collections.ChainMap({}, BOTTOM)),
        between=lambda m, i: BOTTOM.update(scale=1.0 + i),
    ),
    "view of a dict": Script(
        reading(lambda m: m.view["scale"], view=types.MappingProxyType(BOTTOM)),
        between=lambda m, i: BOTTOM.update(scale=1.0 + i),
    ),
    "operators of an object": Script(
        lambda: Reading(lambda m: float(m.by), by=Factor()), between=lambda m, i: setattr(m.by, "scale", 1.0 + i)
    ),
    "iterable object": Script(
        reading(lambda m: sum(m.chain), chain=Chain()), between=lambda m, i: setattr(m.chain, "count", 1 + i)
    ),
    "property of a class": Script(
        reading(lambda m: Meter.scale), between=lambda m, i: setattr(Meter, "state", 1.0 + i)
    ),
    "class patched": Script(Patched, between=patch),
    "bound method replaced": Script(Switching, between=lambda m, i: setattr(m, "bend", m.hard if i % 2 else m.soft)),
    "mutable default": Script(Scaled, by_default, set_default),
    "cached function": Script(Scaled, by_cached, set_cached),
    "context manager": Script(Scaled, by_context, lambda m, i: globals().update(SCALE=1.0 + i)),
    "frozen parameter that forward asks for": Script(
        Freezable, between=lambda m, i: m.body.weight.requires_grad_(i % 2 == 0)
    ),
    "buffer replaced by a tensor": Script(Buffered, between=unbuffer),
    "state dict edited": Script(Scaled, between=edit_state),
    "layers in another order": Script(Listed, between=reorder),
    "copy of a layer": Script(Scaled, between=copied_head),
    "counter in the dict of the model": Script(Counted, wrote=lambda m: m.calls),
    "written into the dict of the model": Script(Scaled, between=lambda m, i: vars(m).update(beta=0.5 * i + 0.5)),
    "hooks on saved tensors": Script(Rounded, line="saved_tensors_hooks", cause="changes what is saved for backward"),
    "hook on the gradient of an activation": Script(
        Damped, line="hidden.register_hook", cause="registers a hook on a gradient"
    ),
}
