"""A model with fakes in place of its tensors, so that it can be captured again and again.

Capture must see plain parameters of global shape on the device where the model will run, whatever the
parameters are by now: on the meta device, or DTensors. It also leaves weak references on what it saw,
which would keep the user's Parameter objects from being swapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar._torch import FakeTensorMode


@dataclass(frozen=True)
class Absent:
    """A parameter that lies on other ranks, and where it was.

    Attributes:
        module, key: the module that had it, and its name there.
        likeness: parameter of the same shape on the meta device; tied names share one.
    """

    module: nn.Module
    key: str
    likeness: nn.Parameter


@contextlib.contextmanager
def stand_ins(
    model: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    absent: Iterable[Absent] = (),
) -> Iterator[list[Tensor]]:
    """Context in which all parameters and buffers of `model` are fake tensors; yields fake copies of `tensors`.

    Tied parameters stay tied.
    """
    mode = FakeTensorMode()
    made: dict[int, Tensor] = {}
    modules = list(model.modules())
    saved = [(dict(m._parameters), dict(m._buffers)) for m in modules]

    def fake(x: Tensor) -> Tensor:
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device=device)

    def once(x: Tensor) -> Tensor:
        if id(x) not in made:
            new = fake(x)
            made[id(x)] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return made[id(x)]

    try:
        for each in absent:
            each.module._parameters[each.key] = each.likeness
        for module in modules:
            for table in (module._parameters, module._buffers):
                table.update({name: once(x) for name, x in table.items() if x is not None})  # type: ignore[misc]
        yield [fake(x) for x in tensors]
    finally:
        for module, (parameters, buffers) in zip(modules, saved, strict=True):
            module._parameters.update(parameters)
            module._buffers.update(buffers)
