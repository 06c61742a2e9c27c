"""Reads safetensors files for torch.distributed.checkpoint, straight into the tensors that the bytes are for.

torch's own reader maps a file into memory, copies a part out of it, and copies that once more. Here the system writes
the bytes where they belong, in one copy, if they lie one after the other in the file and in the tensor, as whole parts
and rows of them do. Other slices, and values that have to be cast, are left to torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.futures import Future


class ShardReader(dcp.HuggingFaceStorageReader):
    """Reads parts of tensors from safetensors files."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Reads what a plan of torch.distributed.checkpoint says. Raises OSError and ValueError for damaged files."""
        by_file: dict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        others = []
        for path, items in by_file.items():
            with open(path, "rb", buffering=0) as file:
                begins = _begins(file)
                others += [item for item in items if not self._read(file, begins, item, planner)]
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _read(self, file: IO[bytes], begins: Mapping[str, int], item: Any, planner: dcp.LoadPlanner) -> bool:
        """Reads one slice of a part; False, with nothing done, where its bytes do not lie in one row."""
        saved, name = self.storage_data[item.storage_index], item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        is_of_rows = list(item.lengths[1:]) == list(saved.shape[1:])
        if not is_of_rows or target.dtype != saved.dtype or type(target) not in (Tensor, nn.Parameter):
            return False
        row_bytes = math.prod(saved.shape[1:]) * saved.dtype.itemsize
        file.seek(begins[name] + (item.storage_offsets[0] * row_bytes if item.lengths else 0))
        room = target if target.is_cpu and target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        _fill(file, room)
        if room is not target:
            target.copy_(room)
        planner.commit_tensor(item, target)
        return True


def _begins(file: IO[bytes]) -> dict[str, int]:
    """Name of a tensor -> where its bytes begin in a file, whose header safetensors has found right."""
    size_bytes = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size_bytes))
    return {name: 8 + size_bytes + x["data_offsets"][0] for name, x in header.items() if name != "__metadata__"}


def _fill(file: IO[bytes], room: Tensor) -> None:
    """Fills a contiguous tensor with the next bytes of a file. Raises ValueError where it has no more."""
    if not room.numel():
        return
    data = room.reshape(-1).view(torch.uint8).numpy().data
    while data:
        found = file.readinto(data)  # type: ignore[attr-defined]
        if not found:
            raise ValueError(f"{file.name} ends {len(data)} bytes too early.")
        data = data[found:]
