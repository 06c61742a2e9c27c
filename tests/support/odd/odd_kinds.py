"""The kinds of Python state that training scripts change or write most often."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.scripts import Between, Scaled, Script, squares


class Counting(Scaled):
    """A counter that forward increments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class WarmingUp(Scaled):
    """A counter that forward increments and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 3)


class Dropping(Scaled):
    """Dropout of probability 0 or 1, whose masks have no random element."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


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


TABLE = {"scale": 1.0}


class FromTable(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE["scale"]


class Growing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(self.factors)


class Recording(Scaled):
    """A list that forward grows."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.means.append(x.mean())
        return super().forward(x)


class Remembering(Scaled):
    """An attribute that forward sets to a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out
        return out


class Noting(Scaled):
    """An attribute that forward sets to a number."""

    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1]
        return super().forward(x)


class Hooked(Scaled):
    """A forward hook that stores the layer's output in a dict of a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = store = dict[str, Tensor]()

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            store["out"] = out.detach()

        self.body.register_forward_hook(keep)


WEIGHTS = [1.0, 2.0]


def weighted_sum(out: Tensor, y: Tensor) -> Tensor:
    return squares(out, y) * WEIGHTS[0] + out.abs().mean() * WEIGHTS[1]


def set_weights(model: nn.Module, i: int) -> None:
    WEIGHTS[:] = [1.0 + i, 2.0 - 0.1 * i]


def replacing() -> Between:
    """Replaces the head before steps 2 and 4."""
    torch.manual_seed(2)
    heads = [nn.Linear(4, 3).double() for _ in range(2)]

    def between(model: Any, i: int) -> None:
        if i in (2, 4):
            model.head = copy.deepcopy(heads[i // 2 - 1])

    return between


def fill_tensor(model: Any, i: int) -> None:
    if i == 0:
        model.beta = torch.tensor(0.5)
    model.beta.fill_(0.5 * i)


KINDS = {
    "annealed attribute": Script(Scaled, between=lambda m, i: setattr(m, "beta", 0.5 * i + 0.5)),
    "list that the loss reads": Script(Scaled, weighted_sum, set_weights),
    "head replaced": Script(Scaled, between=replacing()),
    "tensor attribute": Script(Scaled, between=lambda m, i: setattr(m, "beta", torch.tensor(0.5 * i + 0.5))),
    "tensor attribute that is filled": Script(Scaled, between=fill_tensor),
    "counter": Script(Counting, wrote=lambda m: m.calls),
    "counter that forward reads": Script(WarmingUp, wrote=lambda m: m.calls),
    "probability of dropout": Script(Dropping, between=lambda m, i: setattr(m.drop, "p", float(i % 2))),
    "global table": Script(FromTable, between=lambda m, i: TABLE.update(scale=1.0 + i)),
    "list that the script grows": Script(Growing, between=lambda m, i: m.factors.append(0.5)),
    "number that forward sets": Script(Noting, wrote=lambda m: m.width),
    "layer drop by random.random": Script(
        Skipping, line="random.random()", cause="draws from Python's or numpy's random numbers"
    ),
    "numpy draw": Script(NoisyByNumpy, line="np.random.rand()", cause="draws from Python's or numpy's random numbers"),
    "generator of numpy": Script(NoisyByGenerator, line="uniform()", cause="reads the Generator model.source"),
    "list that forward grows": Script(
        Recording, wrote=lambda m: [x.item() for x in m.means], line="self.means.append", cause="changes model.means"
    ),
    "tensor that forward keeps": Script(
        Remembering, wrote=lambda m: m.last.tolist(), line="self.last = out", cause="sets model.last"
    ),
    "forward hook that keeps a tensor": Script(
        Hooked, wrote=lambda m: m.stored["out"].tolist(), line="def keep", cause="changes store of"
    ),
}
