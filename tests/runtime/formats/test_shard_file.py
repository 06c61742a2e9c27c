"""A rank's file: what safetensors and torch's reader find in it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.formats.shard_file import ShardPart, check_shard, header_digest, write_shard

FORMATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def a_tensor(dtype: torch.dtype) -> Tensor:
    return torch.arange(12).reshape(3, 4).to(dtype)


def test_every_format_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = {str(dtype): a_tensor(dtype) for dtype in FORMATS}
    values |= {"number": torch.tensor(2.5), "nothing": torch.empty(0, 3), "columns": torch.rand(4, 3).T}
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


def swap(data: bytearray, first: int, second: int, size: int) -> None:
    one, other = slice(first, first + size), slice(second, second + size)
    data[one], data[other] = data[other], data[one]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: swap(data, 0, 8, 8),  # words
        lambda data: swap(data, 0, 512, 512),  # sectors of a disk
        lambda data: swap(data, 0, 4096, 4096),  # pages
    ],
)
def test_bytes_that_change_places_are_found(change: Callable[[bytearray], None], tmp_path: Path) -> None:
    path, values = tmp_path / "x", torch.rand(2048, generator=torch.Generator().manual_seed(0))
    write_shard(path, {"x": ShardPart(values, [0])})
    check_shard(path, ["x"])
    content = path.read_bytes()
    data = bytearray(content[-values.nbytes :])
    change(data)
    path.write_bytes(content[: -values.nbytes] + data)
    with pytest.raises(AutoparError, match="x has other bytes than were saved"):
        check_shard(path, ["x"])


def test_a_checksum_is_that_of_the_published_xxh3(tmp_path: Path) -> None:
    """XXH3_64bits of no bytes is 2d06800538d394c2 in its specification."""
    assert xxhash.xxh3_64(b"").hexdigest() == "2d06800538d394c2"
    path, values = tmp_path / "x", torch.arange(2.0)
    write_shard(path, {"x": ShardPart(values, [0])})
    said = b'["x", "F32", [2], {"saved_offsets": [0]}]'
    assert xxhash.xxh3_64(said + values.numpy().tobytes()).hexdigest().encode() in path.read_bytes()


def test_checksums_of_an_earlier_autopar_are_passed_over_with_a_warning(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", {"x": ShardPart(torch.ones(4), [0])})
    content = (tmp_path / "x").read_bytes().replace(b"autopar_xxh3", b"autopar_products")
    length = int.from_bytes(content[:8], "little") + 4
    (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.warns(UserWarning, match="unchecked: their checksums are those of an earlier autopar. Save it again"):
        check_shard(tmp_path / "x", ["x"])


def test_a_wild_length_of_a_header_fills_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.write(b"\xff" * 8)
        file.truncate(10**9)
    tracemalloc.start()
    header_digest(tmp_path / "x")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 150e6


def test_a_file_that_cannot_grow_is_an_error() -> None:
    """/dev/full takes no byte."""
    with pytest.raises(OSError, match="No space left"):
        write_shard(Path("/dev/full"), {"x": ShardPart(torch.ones(4), [0])})
