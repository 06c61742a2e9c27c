"""Reads weights from plain safetensors files, such as transformers writes: whole tensors by names of the state dict.

Each rank reads the byte ranges of its own shards, which torch.distributed.checkpoint finds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError, first_line
from autopar.ir.files import read_json
from autopar.runtime.formats.optimizer_state import ties
from autopar.runtime.formats.shard_reader import ShardReader
from autopar.runtime.ranks.all_ranks import AllRanks

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
PathLike = str | os.PathLike[str]


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
            found = reader_of(files).read_metadata().state_dict_metadata
            stated = _stated_dtype(Path(files[0]).with_name("config.json"))
        except AutoparError:
            raise
        except Exception as error:  # whatever json and safetensors raise for a damaged file
            said = f"{type(error).__name__}: {first_line(error)}"
            raise AutoparError(f"The weights at {given} cannot be read. {said}") from error
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
            if (dtype.is_floating_point, dtype.is_complex) != (own.is_floating_point, own.is_complex):
                found.append(f"{source} has another dtype, {dtype} there and {own} here")
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
            for expected, where in ((state[name].dtype, "in the model"), (self.stated, "by config.json"))
            if expected is not None
            and expected != dtype
            and expected.itemsize == dtype.itemsize
            and expected.is_floating_point == dtype.is_floating_point
        ]
        if found:
            raise AutoparError(
                f"The weights at {self.path} have another format of the same width: {few(found)}. The bytes of one "
                "format are not valid numbers in the other. Build the model in the format of the file, or save the "
                "file in that of the model; where config.json is wrong, correct its dtype."
            )

    def readable(self, model: nn.Module) -> set[str]:
        """Names of the tensors that both the model and the files have: those in the model and those in the files."""
        names = self.names(model)
        return {*names, *names.values()}


def _files_at(given: Path) -> list[Path]:
    """The safetensors files that a path names: the file itself, or those of a folder as transformers chooses them."""
    if given.is_file():
        return [given]
    if (given / ONE_FILE).is_file():
        return [given / ONE_FILE]
    if (given / INDEX).is_file():
        named = sorted(set(read_json(given / INDEX)["weight_map"].values()))
        if outside := [name for name in named if Path(name).name != name]:
            raise AutoparError(f"{given / INDEX} names {few(outside)}, which is not a file of its own folder.")
        files = [given / name for name in named]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise AutoparError(
                f"{given / INDEX} names {len(files)} files, of which {len(missing)} are missing: {few(missing)}. "
                "Fetch them again."
            )
        return files
    found = sorted(file for file in given.glob("*.safetensors") if file.is_file())
    if len(found) == 1:
        return found
    raise AutoparError(
        f"{given} has neither {INDEX} nor {ONE_FILE}, but {len(found)} files *.safetensors. Give the folder "
        "that save_pretrained of transformers wrote, or one file; weights of other formats have to be "
        "saved as safetensors first."
    )


def _refuse_torn_tensors(given: Path, saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raises AutoparError for tensors that stand in several files, or of which a part is in none."""
    torn = [
        f"{name} has {found} numbers in its parts, but should have {kind.size.numel()}"
        for name, kind in saved.items()
        for found in [sum(part.sizes.numel() for part in kind.chunks)]
        if found != kind.size.numel()
    ]
    if torn:
        raise AutoparError(
            f"The files at {given} do not make whole tensors: {few(torn)}. Each tensor must be in one file, or in "
            "parts that fill it: name the files of a single save."
        )


def _stated_dtype(config: Path) -> torch.dtype | None:
    """The format that a model's `config.json` names; None without such a file, or where it names none."""
    try:
        values = read_json(config) if config.is_file() else {}
    except ValueError as error:
        raise AutoparError(f"{config} is not JSON: {error}. Correct or remove it.") from error
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


def reader_of(files: Sequence[str]) -> ShardReader:
    """A reader of these files alone, for torch.distributed.checkpoint."""
    reader = ShardReader(str(Path(files[0]).parent))
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
        dcp.load(room, storage_reader=reader_of(files.files), no_dist=ranks.alone)


def _refuse_torn_ties(files: WeightFiles, model: nn.Module, ranks: AllRanks) -> None:
    """Raises AutoparError, before the model changes, if the files have different values for tied names."""
    state = _torch.entries_here(model.state_dict())
    both = files.saved.keys() & state.keys()
    pairs = [(a, b) for a, b in ties(model).items() if a in both and b in both]
    room = {name: torch.empty_like(state[name]) for pair in pairs for name in pair}
    if not any(ranks.everyones(bool(room))):
        return
    with ranks.naming_failures():
        dcp.load(room, storage_reader=reader_of(files.files), no_dist=ranks.alone)
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
    return _torch.local_of(x).contiguous().reshape(-1).view(torch.uint8)


def _opened(model: nn.Module, path: PathLike) -> tuple[WeightFiles, dict[str, Tensor | DTensor], set[str]]:
    """The files at a path, the tensors to read into by their names in the files, and `WeightFiles.readable`."""
    files = WeightFiles.at(path)
    files.refuse(files.problems(model))
    files.refuse_formats(model)
    state = _torch.entries_here(model.state_dict())
    room = {source: state[name] for name, source in files.names(model).items() if name in state}
    return files, room, files.readable(model)


def few(texts: Sequence[str], count: int = 5) -> str:
    """The first of some texts, and how many more there are."""
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more
