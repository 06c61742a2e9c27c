"""Reading parts of tensors: what torch's own reader gives, in one copy."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.runtime.formats.shard_file import ShardPart, write_shard
from autopar.runtime.formats.shard_reader import ShardReader


def write(folder: Path, whole: Tensor) -> None:
    """Two files of a tensor's rows, and one of another's columns, of a number and of nothing."""
    write_shard(folder / "a.safetensors", {"x": ShardPart(whole[:3], [0, 0]), "y": ShardPart(whole[:, :1], [0, 0])})
    rest = {"number": ShardPart(torch.tensor(2.5), []), "nothing": ShardPart(torch.empty(0, 3), [0, 0])}
    write_shard(
        folder / "b.safetensors", {"x": ShardPart(whole[3:], [3, 0]), "y": ShardPart(whole[:, 1:], [0, 1]), **rest}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_tensor_is_read_from_all_its_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(15).view(5, 3).remainder(4).to(dtype)
    write(tmp_path, whole)
    room = {"x": torch.zeros(5, 3, dtype=dtype), "y": torch.zeros(3, 5, dtype=dtype).T}
    others = {"number": torch.zeros(()), "nothing": torch.zeros(0, 3)}
    with mock.patch.object(dcp.HuggingFaceStorageReader, "_process_read_request") as by_torch:
        dcp.load(room | others, storage_reader=ShardReader(str(tmp_path)), no_dist=True)
    assert torch.equal(room["x"], whole) and torch.equal(room["y"], whole)
    assert others["number"] == 2.5 and not by_torch.called


def test_values_are_cast_by_torch(tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    write(tmp_path, whole)
    room = {"x": torch.zeros(5, 3, dtype=torch.float64)}
    dcp.load(room, storage_reader=ShardReader(str(tmp_path)), no_dist=True)
    assert torch.equal(room["x"], whole.double())


class Slice(dcp.DefaultLoadPlanner):
    """Reads rows and columns of a tensor, as a rank does that has another part than was saved."""

    def __init__(self, rows: slice, columns: slice) -> None:
        super().__init__()
        self.part = torch.zeros(5, 3)[rows, columns].clone()
        self.offsets = (rows.start, columns.start)

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata["x"]
        chunk = type(saved.chunks[0])(torch.Size(self.offsets), self.part.shape)
        return dcp.LoadPlan(create_read_items_for_chunk_list("x", saved, [chunk]))

    def resolve_tensor(self, read_item: dcp.ReadItem) -> Tensor:
        found = self.part
        for dim, (begin, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, begin, size)
        return found


@pytest.mark.parametrize(("rows", "columns"), [((1, 4), (0, 3)), ((4, 5), (0, 3)), ((1, 5), (1, 3))])
def test_a_slice_of_rows_or_columns(rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path) -> None:
    whole = torch.arange(15.0).view(5, 3)
    write(tmp_path, whole)
    planner = Slice(slice(*rows), slice(*columns))
    dcp.load({"x": torch.zeros(5, 3)}, storage_reader=ShardReader(str(tmp_path)), planner=planner, no_dist=True)
    assert torch.equal(planner.part, whole[slice(*rows), slice(*columns)])


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, torch.arange(15.0).view(5, 3))
    reader = ShardReader(str(tmp_path))
    found = reader.read_metadata()
    reader.read_metadata = lambda: found  # type: ignore[method-assign]  # as it was before the file was cut
    file = tmp_path / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointException, match="ends 4 bytes too early"):
        dcp.load({"x": torch.zeros(5, 3), "y": torch.zeros(5, 3)}, storage_reader=reader, no_dist=True)
