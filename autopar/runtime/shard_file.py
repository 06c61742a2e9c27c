"""One rank's file of a checkpoint, in the format of safetensors, as torch's `HuggingFaceStorageReader` reads it.

    8 bytes    length of the header
    header     JSON: name -> dtype, shape, place of its bytes; and for every name where its part lies in the whole
    bytes      the tensors, one after the other

[Note: a file is written beside training] The package safetensors joins all bytes in memory first and keeps Python from
running meanwhile, for as long as a copy of the whole file takes. Here each tensor goes from where it lies to the file
by one system call, during which other threads run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

_PIECE_BYTES = 16 * 2**20  # of one system call
_PACED_BYTES = 2**20  # the same where a rest follows; about a millisecond of a core


@dataclass(frozen=True)
class ShardPart:
    """A rank's part of a tensor.

    Attributes:
        value: the part, on any device.
        offsets: where it begins in the whole tensor, by dim.
    """

    value: Tensor
    offsets: Sequence[int]


def write_shard(
    path: Path, parts: Mapping[str, ShardPart], rest: Callable[[], None] | None = None
) -> None:
    """Writes a file and waits until it is on the disk. Raises OSError where it cannot be written.

    Args:
        path: the file, which is made or replaced.
        parts: parts by the names of their tensors.
        rest: called after every megabyte, to let others have the processor; None to write without rest.
    """
    # The largest numbers come first, so that all lie at multiples of their size.
    order = sorted(parts, key=lambda name: (-parts[name].value.element_size(), name))
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), _header({name: parts[name] for name in order}), rest)
        for name in order:
            _write(file.fileno(), _bytes_of(parts[name].value), rest)
        os.fsync(file.fileno())


def _header(parts: Mapping[str, ShardPart]) -> memoryview:
    """The length of the header and the header."""
    offsets = {name: {"saved_offsets": list(part.offsets)} for name, part in parts.items()}
    header: dict[str, Any] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt",
        }
    }  # fmt: skip
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.value.numel() * part.value.element_size()
        header[name] = {
            "dtype": _dtype_name(part.value.dtype), "shape": list(part.value.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a format, read from a file of nothing."""
    empty = save({"x": torch.empty(0, dtype=dtype)})
    name: str = json.loads(empty[8:])["x"]["dtype"]
    return name


def _bytes_of(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write(file: int, data: memoryview, rest: Callable[[], None] | None) -> None:
    """Writes all bytes, however many a system call takes."""
    piece_bytes = _PIECE_BYTES if rest is None else _PACED_BYTES
    while data:
        data = data[os.write(file, data[:piece_bytes]) :]
        if rest is not None:
            rest()
