"""Anomaly detection of autograd over DTensors: whether any element, on any rank, is not a number.

`torch.autograd.set_detect_anomaly` asks each gradient by an operator that DTensors do not have (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import handlers


@functools.cache
def detect_anomalies() -> None:
    """Makes anomaly detection look at DTensors, from now on; all ranks find what one of them has."""
    handlers()[torch.ops.aten._is_any_true.default] = _is_any_true


def _is_any_true(op: Any, args: tuple[DTensor], kwargs: Mapping[str, Any]) -> Tensor:
    x = args[0]
    found = x._local_tensor.any().int()
    for dim, placement in enumerate(x.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, dist.ReduceOp.MAX, x.device_mesh.get_group(dim))
    return found.bool()
