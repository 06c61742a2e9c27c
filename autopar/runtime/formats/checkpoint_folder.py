"""The folder of a checkpoint: what is in it, and how a new one takes the place of the one before.

[Note: a save is all or nothing] The ranks write to `<path>.partial`. When all have finished, the first
rank looks whether all is there, moves the checkpoint that was at `<path>` to `<path>.previous`, gives the
new one its name, and deletes the old. Whoever dies when, a complete checkpoint is at `<path>` or, between
the two renames, at `<path>.previous`, where `load_checkpoint` looks next. A file in it tells the old one from
a checkpoint that a user has there, which no save deletes.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.errors import AutoparError, first_line
from autopar.ir.files import MOST_LEVELS, check_keys
from autopar.runtime.formats.shard_file import check_shard, header_digest

VERSION = 1
_STATE = "state.pt"
_REPLACED = "replaced-by-a-save"
_OWN = re.compile(rf"shard-[0-9]+\.safetensors|state\.pt|{_REPLACED}")  # names of the files of a checkpoint
_BYTEARRAY = re.compile(rb"c(builtins|__builtin__)\nbytearray\n")  # as pickle names this class
# The fields of `state.pt` and what they are, as `_is_of` reads it: those of every checkpoint, and those that came
# later or that only the checkpoint of a loop has.
_FIELDS = {
    "version": int,
    "extra": dict,
    "has_model": bool,
    "progress": dict | None,
    "ties": {str: str},
    "objects": {str: object},
    "values": {str: dict},
    "groups": [([str], dict)],
}
_LATER_FIELDS = {
    "shapes": {str: [int]},
    "loops": list,
    "blocks": {str: object},
    "step": int,
    "files": {str: int},
    "headers": {str: str},
    "checksums": bool,
}


def beside(folder: Path, what: str) -> Path:
    """The path `<folder>.<what>` in the same folder, such as `last.partial`."""
    return folder.with_name(f"{folder.name}.{what}")


def _is_checkpoint(folder: Path) -> bool:
    return (folder / _STATE).is_file()


def own_files(folder: Path) -> list[Path]:
    """The files of a folder that are called as those of a checkpoint."""
    return [file for file in folder.iterdir() if _OWN.fullmatch(file.name)] if folder.is_dir() else []


def clear(folder: Path, partial: Path) -> None:
    """Makes way for a save. Raises AutoparError where that would delete files that are no checkpoint's."""
    # Another program's may be a `state.pt`, too, but no shard.
    shards = [file for file in own_files(folder) if file.suffix == ".safetensors"]
    if folder.exists() and not shards and any(folder.iterdir()):
        raise AutoparError(
            f"{folder} has files and is not a checkpoint, but would be replaced; give a folder of its own to the "
            "checkpoint."
        )
    for each in (folder, partial, beside(folder, "previous")):
        own = own_files(each)
        others = [file for file in each.iterdir() if file not in own] if each.is_dir() else []
        if others:
            instead = "move it elsewhere" if each == folder else f"give {each.name} another name"
            raise AutoparError(f"{others[0]} would be deleted by a save to {folder}; {instead}.")
    previous = beside(folder, "previous")
    if _is_checkpoint(previous) and not (previous / _REPLACED).exists():
        raise AutoparError(
            f"{previous} is a checkpoint of its own, which a save to {folder} would delete; give it another name."
        )
    remove(partial)


def remove(folder: Path) -> None:
    """Deletes the files of a checkpoint, and their folder unless it has others.

    A `state.pt` without shards is not deleted, since another program may have written it.
    """
    own = sorted(own_files(folder), key=lambda file: file.name != _STATE)
    for file in own if own and own[-1].name != _STATE else ():
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def commit(partial: Path, folder: Path, planned: Metadata, notes: dict[str, Any]) -> None:
    """Gives a complete checkpoint its name, see [Note: a save is all or nothing]."""
    _refuse_incomplete(partial, planned)
    shards = [*partial.glob("*.safetensors")]
    # Sizes alone would be those of another save of this model, too.
    sums = {
        "files": {file.name: file.stat().st_size for file in shards},
        "headers": {file.name: header_digest(file) for file in shards},
    }
    # Whether state.pt has any: a user may have turned those of torch.save off, for its speed. The shards have theirs.
    checksums = torch.serialization.get_crc32_options()
    with (partial / _STATE).open("wb") as file:
        torch.save({**notes, **sums, "checksums": checksums}, file)
        file.flush()
        os.fsync(file.fileno())  # as the shards were
    previous = beside(folder, "previous")
    if folder.exists():
        remove(previous)
        (folder / _REPLACED).touch()
        folder.rename(previous)
    partial.rename(folder)
    remove(previous)


def _refuse_incomplete(partial: Path, planned: Metadata) -> None:
    """Raises AutoparError where a part that some rank wrote is not in the first rank's folder."""
    there = _saved_tensors(partial)
    for name, plan in planned.state_dict_metadata.items():
        assert isinstance(plan, TensorStorageMetadata), name
        wanted = {chunk.offsets for chunk in plan.chunks}
        found = {chunk.offsets for chunk in there[name].chunks} if name in there else set()
        if not wanted <= found:
            raise AutoparError(
                f"{len(wanted - found)} of {len(wanted)} parts of {name} are not in {partial}, though their "
                "ranks wrote them. Give a path on a file system that all ranks share."
            )


def _saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape, dtype and parts of what a folder has."""
    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: x for name, x in found.items() if isinstance(x, TensorStorageMetadata)}


class OtherVersionError(AutoparError):
    """A checkpoint that another autopar wrote, and this one cannot read."""


def located(folder: Path) -> Path:
    """The folder, or where the checkpoint is that it had before a save was cut short."""
    for place in (folder, beside(folder, "previous")):
        if _is_checkpoint(place):
            return place
    unfinished = beside(folder, "partial").exists()
    raise AutoparError(
        f"There is no checkpoint at {folder}" + (": the first save to it did not finish." if unfinished else ".")
    )


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, TensorStorageMetadata]]:
    """The contents of `state.pt`, and the tensors on disk. Raises AutoparError for a damaged checkpoint."""
    try:
        notes = _state(folder / _STATE)
        _refuse_other_files(folder, notes.get("files", {}), notes.get("headers", {}))
        return notes, _saved_tensors(folder)
    except AutoparError:
        raise
    except Exception as error:  # whatever torch.load and safetensors raise for damaged files
        raise AutoparError(f"{folder} is damaged. {_reason(error)}") from error


def check_bytes(folder: Path, notes: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises AutoparError for bytes of tensors that are not those that were saved, see [Note: checksums of parts].

    Args:
        folder: folder of the checkpoint.
        notes: contents of its `state.pt`; a checkpoint of an earlier autopar has no checksums, and is taken as it is.
        own: names of the tensors whose bytes this rank looks at. It looks at what the headers say of all.
    """
    for name in notes["files"] if "checksums" in notes else ():
        try:
            check_shard(folder / name, own)
        except Exception as error:  # whatever a damaged header makes of reading it
            raise AutoparError(f"{folder} is damaged: {name}: {error} {_REMEDY}") from error


def read_saved(path: Path) -> Any:
    """Loads a file of `torch.save` without running code from it. Raises AutoparError for a damaged file.

    Another program may have written the file. The checksum that `torch.save` writes shows a changed byte of a tensor.
    """
    try:
        found = load_plain(path)
        _refuse_other_bytes(path)
    except Exception as error:  # whatever torch.load raises for damaged files
        raise AutoparError(
            f"{path} cannot be read. {_reason(error)} {_REMEDY} A file of torch.save without checksums "
            "(torch.serialization.set_crc32_options(False)) has to be saved again with them."
        ) from error
    return found


def _reason(error: Exception) -> str:
    """What torch says of a file, without its advice to load it with `weights_only=False`, which runs code in it."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line.startswith(("Trying to load", "WeightsUnpickler error"))), None)
    return f"{type(error).__name__}: {said or first_line(error)}"


def load_plain(file: Path | IO[bytes]) -> Any:
    """The values in a file of `torch.save`, without running code from it, on the CPU.

    Raises ValueError for values that take more memory than their file has bytes, or are nested more than `MOST_LEVELS`
    levels deep; whatever `torch.load` raises for others.
    """
    size_bytes = _refuse_wild_records(file)
    if not isinstance(file, Path):
        file.seek(0)
    found = torch.load(file, map_location="cpu", weights_only=True)
    level = [found]
    for _ in range(MOST_LEVELS):
        if any(_own_bytes(x) > size_bytes for x in level):
            raise ValueError("it has a tensor with more bytes than the file")
        # Each once, since what is in a file may stand in many places.
        level = [*{id(x): x for each in level for x in _inside(each)}.values()]
    if level:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return found


def _own_bytes(x: Any) -> int:
    """Bytes of the memory of a plain tensor; 0 for all else."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout == torch.strided
    return x.untyped_storage().nbytes() if is_plain else 0


def _inside(x: Any) -> Iterable[Any]:
    if isinstance(x, dict):
        return (*x, *x.values())
    return x if isinstance(x, (list, tuple, set)) else ()


def _refuse_wild_records(file: Path | IO[bytes]) -> int:
    """The bytes of a file of `torch.save`. Raises ValueError where what it has may take much more memory.

    torch.save packs nothing; packed records, or several over the same bytes, could fill any memory. So could a
    bytearray, which `torch.load` makes of any size that a file names.
    """
    with zipfile.ZipFile(file) as records:
        found = records.infolist()
        is_packed = any(record.compress_type != zipfile.ZIP_STORED for record in found)
        size_bytes = records.fp.seek(0, os.SEEK_END)  # type: ignore[union-attr]
        if is_packed or sum(record.file_size for record in found) > size_bytes:
            raise ValueError("it has packed records, which torch.save does not write")
        for record in found:
            if record.filename.endswith("/data.pkl"):
                del record.CRC  # a file may have no checksums; else they are compared later
                if _BYTEARRAY.search(records.read(record)):
                    raise ValueError("it has a bytearray, which could be of any size; bytes can be saved")
    return int(size_bytes)


def _refuse_other_bytes(path: Path) -> None:
    """Raises ValueError for a file of `torch.save` whose bytes do not fit its checksums."""
    with zipfile.ZipFile(path) as records:
        if bad := records.testzip():  # torch.load does not compare them
            raise ValueError(f"{path.name} has other bytes than were saved (in {bad}).")


def _state(path: Path) -> dict[str, Any]:
    """The contents of `state.pt`. Raises AutoparError for another version; other errors for what is damaged."""
    notes = load_plain(path)
    if notes["version"] != VERSION:
        raise OtherVersionError(
            f"{path.parent} is of version {notes['version']}, but this autopar reads version {VERSION}."
        )
    check_keys(notes, _FIELDS, _LATER_FIELDS)
    for name, kind in (_FIELDS | _LATER_FIELDS).items():
        if name in notes and not _is_of(notes[name], kind):
            raise ValueError(f"its field {name!r} has values of other kinds than were saved")
    if notes.get("checksums"):
        _refuse_other_bytes(path)
    return dict(notes)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind: a type, [kind] for a list, (kind, ...) for a tuple, {kind: kind} for a dict."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is_of(each, kind[0]) for each in value)
    if isinstance(kind, tuple):
        return isinstance(value, tuple) and len(value) == len(kind) and all(map(_is_of, value, kind))
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_is_of(item, each) for item in value.items() for each in kind.items())
    return isinstance(value, kind)


def _refuse_other_files(folder: Path, files: dict[str, int], headers: dict[str, str]) -> None:
    """Raises AutoparError unless the folder has the shards of this save and no others.

    Args:
        folder: folder of the checkpoint.
        files: name of each shard -> its bytes.
        headers: name of each shard -> digest of its header, which has the checksums of its parts.
    """
    there = {file.name for file in folder.glob("*.safetensors")}
    if irregular := sorted(name for name in there if not (folder / name).is_file()):
        raise AutoparError(f"{folder} is damaged: {irregular[0]} is no regular file.")
    for name, wanted_bytes in files.items():
        if Path(name).name != name:
            raise AutoparError(f"{folder} is damaged: it names {name!r}, which is not a file in it.")
        _refuse_other_size(folder / name, wanted_bytes)
    for name, digest in headers.items():
        if name in files and header_digest(folder / name) != digest:
            raise AutoparError(f"{folder} is damaged: {name} is changed, or is a file of another save. {_REMEDY}")
    if files and (strangers := sorted(there - files.keys())):
        raise AutoparError(
            f"{folder} is damaged: it contains {strangers[0]}, which was not saved with it. Move that file elsewhere."
        )


_REMEDY = "Copy it again, or load an earlier checkpoint."


def _refuse_other_size(file: Path, wanted_bytes: int) -> None:
    found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
    if found != f"{wanted_bytes} bytes":
        raise AutoparError(f"{file.parent} is damaged: {file.name} is {found}, of {wanted_bytes} bytes. {_REMEDY}")
