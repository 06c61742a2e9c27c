"""Adafactor of torch.optim for parameters that are shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` with norms over all ranks, for the parameters of a compiled model.

    On DTensors the optimizer of torch 2.13 fails when it squares a norm of which each rank has a part. Here such a norm
    is first summed over ranks; the rest is torch's code. The row and column statistics of a matrix are whole on every
    rank. So is their product, for one matrix at a time; it is as large as the matrix, and no price contains it.
    Arguments are those of `torch.optim.Adafactor`.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Adafactor(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> [tuple(optimizer.state[model.weight][key].shape) for key in ("row_var", "col_var")]
    [(2, 1), (1, 4)]
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with _WholeNorms():
            return super().step(closure)


class _WholeNorms(TorchFunctionMode):
    """Replaces the norm of a rank's part of a DTensor by the norm over the parts of all ranks."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.norm, Tensor.norm) or not isinstance(found, DTensor):
            return found
        placements = [Replicate() if p.is_partial() else p for p in found.placements]
        return found.redistribute(placements=placements)
