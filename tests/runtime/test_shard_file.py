"""A rank's file: what safetensors and torch's reader find in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor

from autopar.runtime.shard_file import ShardPart, write_shard

FORMATS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def a_tensor(dtype: torch.dtype) -> Tensor:
    return torch.arange(12).reshape(3, 4).to(dtype)


def test_every_format_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = {str(dtype): a_tensor(dtype) for dtype in FORMATS}
    values |= {
        "number": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "columns": torch.rand(4, 3).T,
    }
    write_shard(tmp_path / "x", {name: ShardPart(x, [0] * x.ndim) for name, x in values.items()})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert set(file.keys()) == values.keys()
        for name, value in values.items():
            found = file.get_tensor(name)
            assert found.dtype == value.dtype and found.shape == value.shape
            assert torch.equal(found.float(), value.float()), name


def test_parts_of_two_files_are_one_tensor_to_torch(tmp_path: Path) -> None:
    whole = a_tensor(torch.float32)
    write_shard(tmp_path / "a.safetensors", {"x": ShardPart(whole[:2], [0, 0])})
    write_shard(tmp_path / "b.safetensors", {"x": ShardPart(whole[2:], [2, 0])})
    found = {"x": torch.zeros(3, 4)}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(found["x"], whole)


def test_a_file_that_cannot_grow_is_an_error() -> None:
    """/dev/full takes no byte."""
    with pytest.raises(OSError, match="No space left"):
        write_shard(Path("/dev/full"), {"x": ShardPart(torch.ones(4), [0])})
