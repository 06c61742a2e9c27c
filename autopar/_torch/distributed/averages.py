"""Averages of a model whose parameters are DTensors and whose buffers are not.

With `use_buffers=True`, `AveragedModel` hands parameters and buffers of one format to one foreach operator, which torch
(2.13) refuses: "got mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import swa_utils


@functools.cache
def average_dtensors_apart() -> None:
    """Makes `AveragedModel` average DTensors and plain tensors one after the other, from now on."""
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
