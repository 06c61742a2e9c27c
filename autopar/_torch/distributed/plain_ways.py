"""What scripts do with parameters that torch refuses, or does otherwise, where these are DTensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils

from autopar._torch.distributed.dtensors import handlers
from autopar._torch.distributed.gathered_operands import gather_operands
from autopar._torch.distributed.random_fills import draw_whole_on_processors
from autopar._torch.distributed.whole_operands import cut_whole_operands


def treat_as_plain() -> None:
    """Lets scripts fill DTensors with random numbers, write into them, average them, run more operators on them."""
    draw_whole_on_processors()
    cut_whole_operands()
    gather_operands()
    detect_anomalies()
    average_dtensors_apart()


@functools.cache
def average_dtensors_apart() -> None:
    """Makes `AveragedModel` average DTensors and plain tensors one after the other, from now on.

    With `use_buffers=True` it hands parameters and buffers of one format to one foreach operator, which torch (2.13)
    refuses: "got mixed torch.Tensor and DTensor".
    """
    module: Any = swa_utils
    group = module._group_tensors_by_device_and_dtype

    @functools.wraps(group)
    def grouped(lists: Any, *args: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for is_plain in (True, False):
            own = [i for i, x in enumerate(lists[0]) if isinstance(x, DTensor) != is_plain]
            if own:
                groups = group([[each[i] for i in own] for each in lists], *args)
                found |= {(device, (dtype, is_plain)): each for (device, dtype), each in groups.items()}
        return found

    module._group_tensors_by_device_and_dtype = grouped


@functools.cache
def detect_anomalies() -> None:
    """Makes anomaly detection look at DTensors, from now on; all ranks find what one of them has.

    `torch.autograd.set_detect_anomaly` asks each gradient by an operator that DTensors do not have (torch 2.13).
    """
    handlers()[torch.ops.aten._is_any_true.default] = _is_any_true


def _is_any_true(op: Any, args: tuple[DTensor], kwargs: Mapping[str, Any]) -> Tensor:
    x = args[0]
    found = x._local_tensor.any().int()
    for dim, placement in enumerate(x.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, dist.ReduceOp.MAX, x.device_mesh.get_group(dim))
    return found.bool()
