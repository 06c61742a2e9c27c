"""Products of matrices in float8 tiles by torch's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_TILED = (9, 0)  # compute capability of the GPUs whose kernel takes a scale for each 1x128 numbers
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)  # formats in which the kernel gives results


def multiplies_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `product_of_tiles` runs on a device and gives results of a format.

    >>> multiplies_tiles(torch.device("cpu"), torch.bfloat16)
    False
    """
    if device.type != "cuda" or torch.version.hip is not None or dtype not in _RESULTS:
        return False
    return torch.cuda.get_device_capability(device) == _TILED


def product_of_tiles(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left @ right.T by `torch._scaled_mm`, which sums in float32.

    Args:
        left: numbers in float8 e4m3 of shape (rows, k), and float32 scales of shape (rows, k / 128).
        right: the same of shape (columns, k) and (columns, k / 128).
        dtype: format of the result, of shape (rows, columns).
    """
    # The kernel wants the scales of neighbouring rows next to each other.
    scales = [x.t().contiguous().t() for x in (left[1], right[1])]
    return torch._scaled_mm(left[0], right[0].t(), scale_a=scales[0], scale_b=scales[1].t(), out_dtype=dtype)
