"""Weights as others write and read them: safetensors files with the names of the state dict, and no plan.

Reading: every rank reads the byte ranges of its own shards, straight to where the plan has put them.
Writing: every rank writes its own shards to a folder beside, and the first one joins them into plain files,
one tensor at a time, so that no rank ever holds the whole model. Both are torch.distributed.checkpoint's.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.optimizer_state import ties
from autopar.runtime.together import Together

FILE_BYTES = 5 * 10**9  # as transformers' save_pretrained cuts
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_JOINED = "model-*-of-*.safetensors"
PathLike = str | os.PathLike[str]


# --- reading


@dataclass(frozen=True)
class WeightFiles:
    """Files of weights.

    Attributes:
        path: the folder or file that was given.
        files: the safetensors files that count; a folder may have others.
        saved: name of a tensor -> its shape, dtype and parts.
    """

    path: Path
    files: Sequence[str]
    saved: Mapping[str, TensorStorageMetadata]

    @staticmethod
    def at(path: PathLike) -> WeightFiles:
        """The files at a path. Raises AutoparError where there are none, or damaged ones."""
        given = Path(path).resolve()
        files = [str(file) for file in _files_at(given)]
        try:
            found = _reader(files).read_metadata().state_dict_metadata
        except Exception as error:  # whatever safetensors raises for a damaged file
            raise AutoparError(
                f"The weights at {given} cannot be read. {type(error).__name__}: {error}"
            ) from error
        saved = {k: v for k, v in found.items() if isinstance(v, TensorStorageMetadata)}
        return WeightFiles(given, files, saved)

    def names(self, model: nn.Module) -> dict[str, str]:
        """Name in the model's state dict -> name in the files; of tied names any may be in the files."""
        first = ties(model)
        groups: dict[str, list[str]] = {}
        for name in (*first.values(), *first):
            groups.setdefault(first.get(name, name), []).append(name)
        found = {}
        for name in model.state_dict(keep_vars=True):
            alike = (name, *groups.get(first.get(name, name), ()))
            source = next((each for each in alike if each in self.saved), None)
            if source is not None:
                found[name] = source
        return found


def _files_at(given: Path) -> list[Path]:
    """The safetensors files that a path stands for, as transformers chooses them."""
    if given.is_file():
        return [given]
    if (given / _INDEX).is_file():
        named = json.loads((given / _INDEX).read_text())["weight_map"].values()
        files = [given / name for name in sorted(set(named))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise AutoparError(
                f"{given / _INDEX} names {len(files)} files, of which {len(missing)} are missing: {few(missing)}. "
                "Fetch them again."
            )
        return files
    if (given / _ONE_FILE).is_file():
        return [given / _ONE_FILE]
    found = sorted(given.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise AutoparError(
        f"{given} has neither {_INDEX} nor {_ONE_FILE}, and {len(found)} files *.safetensors. Give the folder "
        "that save_pretrained of transformers wrote, or one file; weights of other formats have to be "
        "saved as safetensors first."
    )


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

    Every rank calls this; values are cast to the model's formats.

    Raises AutoparError on every rank for files that are missing, damaged or of another model, naming
    what differs; PeerError if another rank died or hangs.
    """
    ranks = Together(f"Reading the weights at {path}")
    files, room, own = ranks.each(lambda: _opened(model, path))
    strangers = set.intersection(*map(set, ranks.everyones(sorted(set(files.saved) - own))))
    if strangers:
        raise AutoparError(
            f"The weights at {files.path} are of another model: they have {few(sorted(strangers))}, which "
            "the model lacks."
        )
    with ranks.naming_failures():
        dcp.load(room, storage_reader=_reader(files.files), no_dist=ranks.alone)


def _opened(
    model: nn.Module, path: PathLike
) -> tuple[WeightFiles, dict[str, Tensor | DTensor], set[str]]:
    """The files, the tensors to read into by their names there, and all names that the model can read."""
    files = WeightFiles.at(path)
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    names = files.names(model)
    problems = [f"{name} is not there" for name in state if name not in names]
    for name, source in names.items():
        shape, wanted = files.saved[source].size, state[name].shape
        if shape != wanted:
            problems.append(f"{source} has shape {list(shape)} there and {list(wanted)} here")
    if problems:
        raise AutoparError(
            f"The weights at {files.path} are of another model: {few(problems)}. Names are those of "
            "model.state_dict()."
        )
    room = {source: state[name] for name, source in names.items()}
    return files, room, {*names, *names.values()}


# --- writing


def write_weights(
    model: nn.Module, folder: PathLike, *, original: nn.Module, file_bytes: int = FILE_BYTES
) -> None:
    """Writes a model's state dict as plain safetensors files with an index, and its `config` beside them.

    Every rank calls this, with a folder that all of them see; `original` is the user's own model. A tied
    parameter is written once, under its first name, as `safetensors.torch.save_model` does it. Files of
    the same names are replaced when all are complete.

    Raises AutoparError on every rank for what cannot be written; PeerError if another rank died or hangs.
    """
    target = Path(folder).resolve()
    partial = target.with_name(f"{target.name}.partial")
    ranks = Together(f"Exporting to {target}")
    tensors = ranks.each(lambda: _once(model))
    sizes: dict[str, int] = {}
    for own in ranks.everyones({name: t.numel() * t.element_size() for name, t in tensors.items()}):
        sizes |= own
    ranks.first_alone(lambda: shutil.rmtree(partial, ignore_errors=True))
    writer = dcp.HuggingFaceStorageWriter(
        str(partial), fqn_to_index_mapping=file_numbers(sizes, file_bytes),
        save_distributed=True, enable_consolidation=True,
    )  # fmt: skip
    with ranks.naming_failures():
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.alone)
    ranks.first_alone(lambda: _finish(partial, target, original))


def file_numbers(sizes_bytes: Mapping[str, int], file_bytes: int) -> dict[str, int]:
    """Name -> number of the file it goes to, from 1: files are filled in order up to `file_bytes`.

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
    """The tensors of the state dict, tied ones under their first name."""
    state, further = model.state_dict(), ties(model)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise AutoparError(
            f"{few(others)} of the state dict is no tensor, which safetensors cannot hold; save a checkpoint "
            "(autopar.checkpoint.save_checkpoint)."
        )
    return apart({name: value for name, value in state.items() if name not in further})


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that are contiguous, no two of them in the same memory, as safetensors wants them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        pointer = local.untyped_storage().data_ptr()
        found[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return found


def _finish(partial: Path, target: Path, model: nn.Module) -> None:
    """Moves complete files to their folder, and writes what transformers wants beside them."""
    files = [file for file in partial.iterdir() if file.is_file()]
    target.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in files}
    for file in sorted(files, key=lambda file: file.name == _INDEX):  # which names the others
        os.replace(file, target / file.name)
    for old in (*target.glob(_JOINED), target / _ONE_FILE):
        if old.name not in names:
            old.unlink(missing_ok=True)
    shutil.rmtree(partial)
    for config in _configs(model):
        config.save_pretrained(str(target))


def _configs(model: nn.Module) -> Iterable[Any]:
    """The configurations of a model of transformers or diffusers; of another, none."""
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
