"""Scripts whose forward draws, or writes Python values, and scripts with hooks on the backward."""

from __future__ import annotations

import itertools
import random
import time
import types
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.scripts import Between, Scaled, Script


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
        self.box = types.SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.box.scale = x.mean()
        return super().forward(x)


class IntoNewAttribute(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.box = types.SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        self.box.mean = x.mean()
        return super().forward(x)


class IntoProperty(Scaled):
    """A property of an object, which is computed at its first use and kept by the object."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Cached()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.box.scale


class Cached:
    @cached_property
    def scale(self) -> Tensor:
        return torch.full((), 2.0)


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


def forget(model: nn.Module, number: int) -> None:
    """Empties, before the first step, the globals that models of this file write."""
    global COUNT
    if number == 0:
        COUNT = 0
        SEEN.clear()
        CACHE.clear()


def hook_on_parameter(model: Any) -> None:
    model.body.weight.register_hook(lambda g: g * 2)


def hook_on_accumulation(model: Any) -> None:
    model.body.weight.register_post_accumulate_grad_hook(double_gradient)


def double_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def hook_on_module(model: Any) -> None:
    model.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))


def _before(step: int, hook: Callable[[Any], None]) -> Between:
    return lambda model, number: hook(model) if number == step else None


WRITES = {
    "clock": Script(Clocked, line="time.time()", cause="reads the clock"),
    "random.choice": Script(Choosing, line="random.choice", cause="draws from Python's"),
    "numpy permutation": Script(Shuffling, line="np.random.permutation", cause="draws from Python's or numpy's"),
    "itertools.count": Script(Iterating, line="next(self.source)", cause="reads the count model.source"),
    "own random.Random": Script(Generating, line="self.own.random()", cause="draws from Python's"),
    "list of a global": Script(
        IntoGlobal,
        between=forget,
        wrote=lambda m: [x.item() for x in SEEN],
        line="SEEN.append",
        cause="changes the global SEEN",
    ),
    "tensor into a global dict": Script(
        IntoCache,
        between=forget,
        wrote=lambda m: CACHE["last"].tolist(),
        line="CACHE[",
        cause="changes the global CACHE",
    ),
    "global counter": Script(
        GlobalCounter, between=forget, wrote=lambda m: COUNT, line="COUNT += 1", cause="changes the global COUNT"
    ),
    "attribute of an object": Script(
        IntoObject, wrote=lambda m: m.box.scale.item(), line="self.box.scale", cause="changes model.box.scale"
    ),
    "new attribute of an object": Script(
        IntoNewAttribute, wrote=lambda m: m.box.mean.item(), line="self.box.mean", cause="changes model.box.mean"
    ),
    "cached property of an object": Script(IntoProperty, wrote=lambda m: m.box.scale.item()),
    "attribute of a submodule": Script(
        IntoSubmodule, wrote=lambda m: m.body.seen.tolist(), line="self.body.seen", cause="sets model.body.seen"
    ),
    "deleted attribute": Script(
        Deleting, wrote=lambda m: hasattr(m, "first"), line="del self.first", cause="deletes model.first"
    ),
    "list iterator": Script(
        Yielding,
        wrote=lambda m: len(list(m.scales)),
        line="next(self.scales)",
        cause="reads the list_iterator model.scales",
    ),
}
HOOKS = {
    f"hook on {what}, added before step {step}": Script(Scaled, between=_before(step, hook))
    for what, hook in {
        "the gradient of a parameter": hook_on_parameter,
        "an accumulated gradient": hook_on_accumulation,
        "the backward of a module": hook_on_module,
    }.items()
    for step in (0, 2)
}
