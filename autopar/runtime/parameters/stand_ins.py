"""Puts fake tensors in place of a model's tensors, so that it can be captured repeatedly.

Capture needs plain parameters of global shape on the device where the model will run, even if the parameters are on
the meta device or DTensors by now. It also leaves weak references to the tensors that it saw, and the user's Parameter
objects could then not be swapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from autopar._torch import FakeTensorMode


@contextlib.contextmanager
def stand_ins(model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
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
        for module in modules:
            for table in (module._parameters, module._buffers):
                table.update({name: once(x) for name, x in table.items() if x is not None})  # type: ignore[misc]
        yield [fake(x) for x in tensors]
    finally:
        for module, (parameters, buffers) in zip(modules, saved, strict=True):
            module._parameters.update(parameters)
            module._buffers.update(buffers)
