"""Dropout: masks that are independent across split parts and identical across replicas.

[Note: keys of random ops] All ranks draw in step: the runtime gives them one seed per step, and every
random op draws one number from it, its key. What an op draws on a rank depends on that key and on the
rank's position along the axes that split the op, and so is the same wherever the op is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopar.rules.elementwise import elementwise
from autopar.rules.spec import Call, Local, Spec, run_as_is

aten = torch.ops.aten
_KEYS = 2**31 - 1


def dropout(call: Call) -> Spec:
    """native_dropout(x, p, train) -> (x * mask / (1 - p), mask)."""
    spec = elementwise(call)
    dropped = call["train"] is not False and 0 < call["p"] < 1
    localize = _Localizer(tuple(spec.sizes), call["p"]) if dropped else run_as_is
    return replace(spec, localize=localize)


class _Localizer:
    def __init__(self, letters: tuple[str, ...], p: float) -> None:
        self.letters, self.p = letters, p

    def __call__(self, local: Local) -> tuple[fx.Node, fx.Node]:
        x = local.args[0]
        key = local.emit(aten.randint.default, _KEYS, [1])
        axes = [axis for letter in self.letters for axis in local.axes(letter)]
        if axes:
            key = local.emit(aten.add.Tensor, key, _position(local, axes), alpha=_KEYS)
        mask = local.emit(torch.ops.autopar.keep_mask.default, x, key, self.p)
        scaled = local.emit(aten.mul.Tensor, x, 1 / (1 - self.p))
        return local.emit(aten.mul.Tensor, scaled, mask), mask


def _position(local: Local, axes: list[tuple[str, int]]) -> fx.Node:
    """A tensor of one element: this rank's number among those that split the op."""
    total = 1
    for _, size in axes:
        total *= size
    position = local.emit(aten.arange.default, total)  # on the CPU, where keys are drawn
    for name, size in axes:
        position = local.emit(
            torch.ops.autopar.shard.default, position, [0], size, name, "all_gather"
        )
    return position


RULES: dict[str, Callable[[Call], Spec]] = {"aten.native_dropout": dropout}
