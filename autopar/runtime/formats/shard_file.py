"""One rank's file of a checkpoint, in the format of safetensors, as torch's `HuggingFaceStorageReader` reads it.

    8 bytes    length of the header
    header     JSON: name -> dtype, shape, place of its bytes; and for every name where its part lies in the whole,
               and a checksum of all of this and of the bytes
    bytes      the tensors, one after the other

[Note: a file is written beside training] The package safetensors joins all bytes in memory first and keeps Python from
running meanwhile, for as long as a copy of the whole file takes. Here each tensor goes from where it lies to the file
by one system call, during which other threads run.

[Note: checksums of parts] The checksum of a part is XXH3 (64 bits) of what the header says of it and of its bytes: no
damage passes but one of 2^64. It is computed at the speed of memory, several times that of CRC-32
(`benchmarks/fuzz/results.md`). It is not a signature: whoever can write the file can write a checksum, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.files import check_nesting
from autopar.runtime.ranks.all_ranks import warn_together

_PIECE_BYTES = 2**20  # of one system call; about a millisecond of a core, and it stays in its cache
_CHECKSUMS = "autopar_xxh3"  # what they are, since other checksums would not fit
_EARLIER_CHECKSUMS = "autopar_products"  # of 0.1.0 while it was made
_MOST_HEADER_BYTES = 100_000_000  # that safetensors reads
_OFFSETS = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class ShardPart:
    """A rank's part of a tensor.

    Attributes:
        value: the part, on any device.
        offsets: where it begins in the whole tensor, by dim.
    """

    value: Tensor
    offsets: Sequence[int]


def write_shard(path: Path, parts: Mapping[str, ShardPart], rest: Callable[[], None] | None = None) -> None:
    """Writes a file and waits until it is on the disk. Raises OSError where it cannot be written.

    Args:
        path: the file, which is made or replaced.
        parts: parts by the names of their tensors.
        rest: called after every megabyte, to let others have the processor; None to write without rest.
    """
    # The largest numbers come first, so that all lie at multiples of their size.
    order = sorted(parts, key=lambda name: (-parts[name].value.element_size(), name))
    entries = entries_of({name: (parts[name].value.shape, parts[name].value.dtype) for name in order})
    offsets = {name: {"saved_offsets": list(parts[name].offsets)} for name in order}
    sums = {name: _begun(name, entries[name], offsets[name]) for name in order}
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), _header(entries, offsets, sums))
        for name in order:
            data = _bytes_of(parts[name].value)
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                # Summed just before it is written, while it is on its way through the processor's cache.
                sums[name].update(piece)
                _write(file.fileno(), piece)
                if rest is not None:
                    rest()
        # All checksums have one length, so that this header is as long as the first.
        file.seek(0)
        _write(file.fileno(), _header(entries, offsets, sums))
        os.fsync(file.fileno())


def entries_of(kinds: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, dict[str, Any]]:
    """The entry in a header of every tensor, given their shapes and formats, whose bytes lie one after the other."""
    entries, end = {}, 0
    for name, (shape, dtype) in kinds.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    return entries


def header_of(entries: Mapping[str, Any], about: Mapping[str, str]) -> memoryview:
    """The length of a header and the header, which also has some words about the file."""
    text = json.dumps({"__metadata__": about, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _header(entries: Mapping[str, Any], offsets: Mapping[str, Any], sums: Mapping[str, xxhash.xxh3_64]) -> memoryview:
    about = {
        _OFFSETS: json.dumps(offsets),
        "DCP_VERSION": "1.0",
        "format": "pt",
        _CHECKSUMS: json.dumps({name: found.hexdigest() for name, found in sums.items()}),
    }
    return header_of(entries, about)


def _begun(name: str, entry: Mapping[str, Any], offsets: Mapping[str, Any]) -> xxhash.xxh3_64:
    """A checksum of what the header says of a part, see [Note: checksums of parts]; its bytes come next."""
    return xxhash.xxh3_64(json.dumps([name, entry["dtype"], entry["shape"], offsets]).encode())


def check_shard(path: Path, own: Collection[str]) -> None:
    """Raises AutoparError for a file that is not as `write_shard` wrote it; warns of checksums of earlier times.

    Args:
        path: the file.
        own: names of the tensors whose bytes are looked at; all names may be given.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        begin = 8 + int.from_bytes(whole[:8], "little")
        header = _parsed(whole[8:begin])
        about = header.pop("__metadata__")
        if _EARLIER_CHECKSUMS in about:
            warn_together(
                f"The bytes of {path.parent} are loaded unchecked: their checksums are those of an earlier autopar. "
                "Save it again to have them checked.",
                stacklevel=2,
            )
            return
        if _CHECKSUMS not in about:
            raise AutoparError("its checksums are not those of this autopar; load it where it was saved.")
        offsets, sums = _parsed(about[_OFFSETS]), _parsed(about[_CHECKSUMS])
        if not (header.keys() == offsets.keys() == sums.keys()):
            raise AutoparError("its header names tensors other than those that were saved.")

        def check(name: str) -> None:
            entry = header[name]
            first, last = entry["data_offsets"]
            found = _begun(name, entry, offsets[name])
            with memoryview(whole)[begin + first : begin + last] as data:
                found.update(data)
            if found.hexdigest() != sums[name]:
                raise AutoparError(f"{name} has other bytes than were saved (its checksum).")

        # They are computed without Python's lock, so that as many threads as torch uses share a file.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(check, sorted(header.keys() & set(own))))


def header_digest(path: Path) -> str:
    """A hash of a file's header, and so of its tensors' checksums: it tells one save from another of the same model."""
    with path.open("rb") as file:
        size_bytes = min(int.from_bytes(file.read(8), "little"), _MOST_HEADER_BYTES)
        return hashlib.sha256(file.read(size_bytes)).hexdigest()[:16]


def _parsed(text: str | bytes) -> Any:
    check_nesting(text if isinstance(text, str) else text.decode())
    return json.loads(text)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors, read from a file that it writes of an empty tensor; "" where it has none."""
    try:
        empty = save({"x": torch.empty(0, dtype=dtype, device="cpu")})
    except KeyError:
        return ""
    name: str = json.loads(empty[8:])["x"]["dtype"]
    return name


def _bytes_of(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _write(file: int, data: memoryview) -> None:
    """Writes all bytes, however many a system call takes."""
    while data:
        data = data[os.write(file, data) :]
