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

    On DTensors the optimizer of torch 2.13 stops at a square of a norm of which each rank has a part. Here such a
    norm is summed over ranks first; all else is torch's. The row and the column of a matrix are whole on every
    rank, and so is their product for a moment, one matrix after the other: it is as large as the whole matrix
    and in no price. Arguments are those of `torch.optim.Adafactor`.

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
    """Makes the norm of a DTensor that norm of all ranks' parts where a rank has its own part's alone."""

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
