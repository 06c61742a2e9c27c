"""torch's kernel for products of float8 with a scale for each 1x128 numbers."""

import pytest
import torch

from autopar import _torch
from autopar.ops.float8 import quantized

CUDA = torch.device("cuda", 0)
HAS_KERNEL = torch.cuda.is_available() and _torch.multiplies_tiles(CUDA, torch.bfloat16)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_other_devices_have_no_such_kernel(kind):
    assert not _torch.multiplies_tiles(torch.device(kind), torch.bfloat16)


def test_the_format_of_the_result_is_asked_before_the_device():
    assert not _torch.multiplies_tiles(CUDA, torch.float64)


@pytest.mark.skipif(not HAS_KERNEL, reason="no GPU of compute capability 9.0")
def test_the_kernel_gives_what_its_operands_stand_for():
    torch.manual_seed(0)
    left, right = (quantized(torch.randn(rows, 256, device=CUDA)) for rows in (64, 128))
    found = _torch.product_of_tiles(left, right, torch.bfloat16)
    expected = left.values() @ right.values().t()
    assert torch.allclose(found.float(), expected, rtol=2**-8, atol=2**-6)
