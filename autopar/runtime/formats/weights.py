"""Weights in plain safetensors files, such as transformers writes and reads: whole tensors by names of the state dict.

To read, each rank reads the byte ranges of its own shards. To write, each rank saves its own shards to a temporary
folder, and the first rank joins them into plain files, one tensor at a time, so that no rank holds the whole
model. torch.distributed.checkpoint reads and saves the shards.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ir.files import read_json
from autopar.runtime.formats.optimizer_state import ties
from autopar.runtime.ranks.all_ranks import AllRanks

FILE_BYTES = 5 * 10**9  # size at which save_pretrained of transformers begins the next file
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_JOINED = "model-*-of-*.safetensors"
_OPEN_FILES = 256  # shards that are open at a time; the usual limit of a process is 1,024 files
# The names of dtypes in the safetensors format.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
PathLike = str | os.PathLike[str]


# --- reading


@dataclass(frozen=True)
class WeightFiles:
    """Safetensors files with the weights of one model.

    Attributes:
        path: folder or file that the user named.
        files: paths of the safetensors files to read; a folder may have others.
        saved: name of a tensor in the files -> its shape, dtype and chunks.
        stated: format of the weights by the `config.json` beside them; None where that names none.
    """

    path: Path
    files: Sequence[str]
    saved: Mapping[str, TensorStorageMetadata]
    stated: torch.dtype | None = None

    @staticmethod
    def at(path: PathLike) -> WeightFiles:
        """The files at a path. Raises AutoparError if there are none, or if one is damaged."""
        given = Path(path).resolve()
        try:
            files = [str(file) for file in _files_at(given)]
            found = _reader(files).read_metadata().state_dict_metadata
            stated = _stated_dtype(Path(files[0]).with_name("config.json"))
        except AutoparError:
            raise
        except Exception as error:  # whatever json and safetensors raise for a damaged file
            raise AutoparError(f"The weights at {given} cannot be read. {type(error).__name__}: {error}") from error
        saved = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}
        _refuse_torn_tensors(given, saved)
        return WeightFiles(given, files, saved, stated)

    @property
    def words(self) -> str:
        """What the files have, in words that are the same wherever they lie."""
        kinds = [f"{name} {list(x.size)} {x.properties.dtype}" for name, x in sorted(self.saved.items())]
        return f"{len(kinds)} tensors {hashlib.sha256(repr(kinds).encode()).hexdigest()[:12]}"

    def names(self, model: nn.Module) -> dict[str, str]:
        """Name in the model's state dict -> name in the files, which may have any one of the names of tied tensors."""
        first = ties(model)
        groups: dict[str, list[str]] = {}
        for name in (*first.values(), *first):
            groups.setdefault(first.get(name, name), []).append(name)
        found = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                continue
            alike = (name, *groups.get(first.get(name, name), ()))
            source = next((each for each in alike if each in self.saved), None)
            if source is not None:
                found[name] = source
        return found

    def check(self, model: nn.Module) -> None:
        """Raises AutoparError, which names the differences, unless the files have exactly the tensors of this model."""
        problems = self.problems(model)
        strangers = sorted(set(self.saved) - self.readable(model))
        problems += [f"{name}, which the model lacks" for name in strangers]
        self.refuse(problems)
        self.refuse_formats(model)

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises AutoparError if there are problems.

        Args:
            problems: differences between the files and the model, one phrase for each, for the message of the error.
        """
        if problems:
            raise AutoparError(
                f"The weights at {self.path} are of another model: {few(problems)}. Names are those of "
                "model.state_dict()."
            )

    def problems(self, model: nn.Module) -> list[str]:
        """Phrases for the tensors of the model that the files lack, or have in another shape or kind of number."""
        state = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
        names = self.names(model)
        found = [f"{name} is not there" for name in state if name not in names]
        for name, source in names.items():
            shape, wanted = self.saved[source].size, state[name].shape
            if shape != wanted:
                found.append(f"{source} has shape {list(shape)} there and {list(wanted)} here")
            dtype, own = self.saved[source].properties.dtype, state[name].dtype
            if (dtype.is_floating_point, dtype.is_complex) != (
                own.is_floating_point,
                own.is_complex,
            ):
                found.append(f"{source} has numbers of another kind, {dtype} there and {own} here")
        return found

    def refuse_formats(self, model: nn.Module) -> None:
        """Raises AutoparError for tensors of another format, of the same width, than the model or `config.json` has.

        A cast would lose values. And the same bytes are numbers in either format, so that nothing else shows a header
        that names the wrong one.
        """
        state = model.state_dict(keep_vars=True)
        found = [
            f"{source} is {dtype} in its file and {expected} {where}"
            for name, source in self.names(model).items()
            for dtype in [self.saved[source].properties.dtype]
            for expected, where in (
                (state[name].dtype, "in the model"),
                (self.stated, "by config.json"),
            )
            if expected is not None
            and expected != dtype
            and expected.itemsize == dtype.itemsize
            and expected.is_floating_point == dtype.is_floating_point
        ]
        if found:
            raise AutoparError(
                f"The weights at {self.path} have another format of the same width: {few(found)}. Numbers of one are "
                "none of the other. Build the model in the format of the file, or save the file in that of the model; "
                "where config.json is wrong, mend its dtype."
            )

    def readable(self, model: nn.Module) -> set[str]:
        """Names of the tensors that both the model and the files have: those in the model and those in the files."""
        names = self.names(model)
        return {*names, *names.values()}


def _files_at(given: Path) -> list[Path]:
    """The safetensors files that a path names: the file itself, or those of a folder as transformers chooses them."""
    if given.is_file():
        return [given]
    if (given / _ONE_FILE).is_file():
        return [given / _ONE_FILE]
    if (given / _INDEX).is_file():
        named = sorted(set(read_json(given / _INDEX)["weight_map"].values()))
        if outside := [name for name in named if Path(name).name != name]:
            raise AutoparError(f"{given / _INDEX} names {few(outside)}, which is no file of its own folder.")
        files = [given / name for name in named]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise AutoparError(
                f"{given / _INDEX} names {len(files)} files, of which {len(missing)} are missing: {few(missing)}. "
                "Fetch them again."
            )
        return files
    found = sorted(given.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise AutoparError(
        f"{given} has neither {_INDEX} nor {_ONE_FILE}, and {len(found)} files *.safetensors. Give the folder "
        "that save_pretrained of transformers wrote, or one file; weights of other formats have to be "
        "saved as safetensors first."
    )


def _refuse_torn_tensors(given: Path, saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raises AutoparError for tensors that stand in several files, or of which a part is in none."""
    torn = [
        f"{name} has {found} numbers in its parts, of {kind.size.numel()}"
        for name, kind in saved.items()
        for found in [sum(part.sizes.numel() for part in kind.chunks)]
        if found != kind.size.numel()
    ]
    if torn:
        raise AutoparError(
            f"The files at {given} do not make whole tensors: {few(torn)}. Each has to be in one file, or in parts "
            "that fill it: name the files of one save alone."
        )


def _stated_dtype(config: Path) -> torch.dtype | None:
    """The format that a model's `config.json` names; None without such a file, or where it names none."""
    try:
        values = read_json(config) if config.is_file() else {}
    except ValueError as error:
        raise AutoparError(f"{config} is not JSON: {error}. Mend or remove it.") from error
    stated = values.get("dtype") or values.get("torch_dtype") if isinstance(values, dict) else None
    named = str(stated).removeprefix("torch.")
    found = getattr(torch, named, None)
    return found if isinstance(found, torch.dtype) else None


class _TheseFiles(FileSystem):
    """A file system where every folder lists the same files."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__()
        self._files = files

    def ls(self, path: PathLike) -> list[str]:
        return list(self._files)


def _reader(files: Sequence[str]) -> dcp.HuggingFaceStorageReader:
    reader = dcp.HuggingFaceStorageReader(str(Path(files[0]).parent))
    reader.fs = _TheseFiles(files)
    return reader


def read_weights(model: nn.Module, path: PathLike) -> None:
    """Copies weights from safetensors files into a model, whose parameters may be DTensors.

    Every rank calls this; values are cast to the model's dtypes.

    Raises AutoparError on every rank for files that are missing, damaged, of another model or of a format of the same
    width, which names the differences; PeerError if another rank died or hangs.
    """
    ranks = AllRanks(f"Reading the weights at {path}")
    files, room, own = ranks.each(lambda: _opened(model, path))
    strangers = set.intersection(*map(set, ranks.everyones(sorted(set(files.saved) - own))))
    files.refuse([f"{name}, which the model lacks" for name in sorted(strangers)])
    _refuse_torn_ties(files, model, ranks)
    with ranks.naming_failures():
        dcp.load(room, storage_reader=_reader(files.files), no_dist=ranks.alone)


def _refuse_torn_ties(files: WeightFiles, model: nn.Module, ranks: AllRanks) -> None:
    """Raises AutoparError, before the model changes, if the files have different values for tied names."""
    state = model.state_dict()
    both = files.saved.keys() & state.keys()
    pairs = [(a, b) for a, b in ties(model).items() if a in both and b in both]
    room = {name: torch.empty_like(state[name]) for pair in pairs for name in pair}
    if not any(ranks.everyones(bool(room))):
        return
    with ranks.naming_failures():
        dcp.load(room, storage_reader=_reader(files.files), no_dist=ranks.alone)
    torn = [pair for pair in pairs if not torch.equal(*(_bits(room[name]) for name in pair))]
    found = sorted({pair for own in ranks.everyones(torn) for pair in own})
    if found:
        names = few([f"{a} and {b}" for a, b in found])
        raise AutoparError(
            f"The weights at {files.path} have different values for {names}, which are one tensor in the model. Save "
            "them from a model that ties them, or build the model without tying (tie_word_embeddings=False in "
            "transformers)."
        )


def _bits(x: Tensor) -> Tensor:
    """The bytes of this rank's local tensor. Comparing bytes makes a NaN equal to itself."""
    return _local(x).contiguous().reshape(-1).view(torch.uint8)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _opened(model: nn.Module, path: PathLike) -> tuple[WeightFiles, dict[str, Tensor | DTensor], set[str]]:
    """The files at a path, the tensors to read into by their names in the files, and `WeightFiles.readable`."""
    files = WeightFiles.at(path)
    files.refuse(files.problems(model))
    files.refuse_formats(model)
    state = model.state_dict()
    room = {source: state[name] for name, source in files.names(model).items()}
    return files, room, files.readable(model)


# --- writing


def write_weights(model: nn.Module, folder: PathLike, *, original: nn.Module, file_bytes: int = FILE_BYTES) -> None:
    """Writes a model's state dict as plain safetensors files with an index, and its `config` into the same folder.

    Every rank calls this. A tied parameter is written once, under its first name, as `safetensors.torch.save_model`
    does it. Files of the same names are replaced when all new ones are complete.

    Args:
        folder: folder that all ranks see.
        original: the user's own model, which has the `config`.
        file_bytes: size after which the next file begins.

    Raises AutoparError on every rank for what cannot be written; PeerError if another rank died or hangs.
    """
    target = Path(folder).resolve()
    partial = target.with_name(f"{target.name}.partial")
    ranks = AllRanks(f"Exporting to {target}")
    tensors = ranks.each(lambda: _once(model))
    sizes: dict[str, int] = {}
    for own in ranks.everyones({name: t.numel() * t.element_size() for name, t in tensors.items()}):
        sizes |= own
    numbers = file_numbers(sizes, file_bytes)
    ranks.first_alone(lambda: shutil.rmtree(partial, ignore_errors=True))
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with ranks.naming_failures():
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.alone)
    ranks.first_alone(lambda: _finish(partial, target, numbers, original))


def file_numbers(sizes_bytes: Mapping[str, int], file_bytes: int) -> dict[str, int]:
    """Name of a tensor -> number of its file, from 1. Files are filled in order up to `file_bytes`.

    >>> file_numbers({"a": 3, "b": 3, "c": 9}, 6)
    {'a': 1, 'b': 1, 'c': 2}
    """
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes_bytes.items():
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, each tied tensor only under its first name.

    Raises AutoparError for entries that are not tensors, and for dtypes that safetensors does not have.
    """
    state, further = model.state_dict(), ties(model)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise AutoparError(
            f"{few(others)} of the state dict is no tensor, which safetensors cannot hold; save a checkpoint "
            "(autopar.checkpoint.save_checkpoint)."
        )
    unknown = [name for name, value in state.items() if value.dtype not in _NAMES]
    if unknown:
        raise AutoparError(
            f"{few(unknown)} is of a format that safetensors has no word for ({state[unknown[0]].dtype}); save a "
            "checkpoint (autopar.checkpoint.save_checkpoint)."
        )
    return apart({name: value for name, value in state.items() if name not in further})


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where safetensors requires it: all are contiguous, and no two share memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        pointer = _local(tensor).untyped_storage().data_ptr()
        is_apart = tensor.is_contiguous() and not (pointer and pointer in seen)  # 0 has no memory
        found[name] = tensor.detach() if is_apart else _torch.copied(tensor.detach())
        seen.add(pointer)
    return found


def _finish(partial: Path, target: Path, numbers: Mapping[str, int], model: nn.Module) -> None:
    """Joins the shards of all ranks, and moves plain files and configurations into the target folder."""
    for config in _configs(model):
        config.save_pretrained(str(partial))
    shards = sorted(str(file) for file in partial.glob("*.safetensors"))
    (partial / _INDEX).write_text(json.dumps(_join(shards, partial, numbers), indent=2))
    for shard in shards:
        os.unlink(shard)
    target.mkdir(parents=True, exist_ok=True)
    # The old index goes first and the new one comes last, so that no index ever lists old and new files.
    for old in (target / _INDEX, target / _ONE_FILE, *target.glob(_JOINED)):
        old.unlink(missing_ok=True)
    for file in sorted(partial.iterdir(), key=lambda file: file.name == _INDEX):
        os.replace(file, target / file.name)
    partial.rmdir()


def _join(shards: Sequence[str], folder: Path, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Writes whole tensors to plain files, one at a time; returns the index of these files.

    The function for this in torch 2.13 writes tensors of shape `()` as zeros, and fails for integers.
    """
    metadata = _reader(shards).read_metadata()
    weight_map: dict[str, str] = {}
    total_bytes = 0
    opened = functools.lru_cache(_OPEN_FILES)(functools.partial(safe_open, framework="pt"))
    for number in sorted(set(numbers.values())):
        names = [name for name in numbers if numbers[name] == number]
        file = folder / f"model-{number:05d}-of-{max(numbers.values()):05d}.safetensors"
        kinds = {name: metadata.state_dict_metadata[name] for name in names}
        with file.open("wb") as stream:
            stream.write(_header(kinds))
            for name in names:
                whole = _whole(name, kinds[name], metadata.storage_data, opened)
                stream.write(whole.reshape(-1).view(torch.uint8).numpy().data)
                total_bytes += whole.nbytes
        weight_map.update(dict.fromkeys(names, file.name))
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


def _header(kinds: Mapping[str, Any]) -> bytes:
    """The header of a safetensors file: the length of a JSON text, and this text with the place of each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        start, end = end, end + math.prod(kind.size) * kind.properties.dtype.itemsize
        dtype = _NAMES[kind.properties.dtype]
        entries[name] = {"dtype": dtype, "shape": list(kind.size), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _whole(name: str, kind: Any, places: Mapping[MetadataIndex, Any], opened: Callable[[str], Any]) -> Tensor:
    """A whole tensor, put together from the chunks that ranks have written to files; `opened` opens a file."""
    whole = torch.empty(kind.size, dtype=kind.properties.dtype)
    for chunk in kind.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        part = opened(place.relative_path).get_tensor(name)
        slices = [slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        whole[tuple(slices)] = part
    return whole


def _configs(model: nn.Module) -> Iterable[Any]:
    """The configurations of a model of transformers or diffusers; none for any other model."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]
        config.dtype = next((p.dtype for p in model.parameters()), None)
    found = (config, getattr(model, "generation_config", None))
    return [each for each in found if callable(getattr(each, "save_pretrained", None))]


def few(texts: Sequence[str], count: int = 5) -> str:
    """The first of some texts, and how many more there are."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more
