"""Writes weights as plain safetensors files, such as transformers reads: whole tensors by names of the state dict.

Each rank saves its own shards to a temporary folder, by torch.distributed.checkpoint, and the first rank joins them
into plain files, one tensor at a time, so that no rank holds the whole model.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.formats.optimizer_state import ties
from autopar.runtime.formats.shard_file import dtype_name, entries_of, header_of
from autopar.runtime.formats.weights import INDEX, ONE_FILE, PathLike, few, reader_of
from autopar.runtime.ranks.all_ranks import AllRanks

FILE_BYTES = 5 * 10**9  # size at which save_pretrained of transformers begins the next file
_JOINED = "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"
_MARK = ".autopar-export"  # an empty file in a folder that an export has made, and the next one may delete
_OPEN_FILES = 256  # shards that are open at a time; the usual limit of a process is 1,024 files


def write_weights(model: nn.Module, folder: PathLike, *, original: nn.Module, file_bytes: int = FILE_BYTES) -> None:
    """Writes a model's state dict as plain safetensors files with an index, and its `config` into the same folder.

    Every rank calls this. A tied parameter is written once, under its first name, as `safetensors.torch.save_model`
    does it. The folder's weights in safetensors files, and files of the same names, are replaced when all new ones are
    complete.

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
    ranks.first_alone(lambda: _begin(partial))
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with ranks.naming_failures():
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.alone)
    ranks.first_alone(lambda: _finish(partial, target, numbers, original))


def _begin(partial: Path) -> None:
    """Makes the temporary folder anew. Raises AutoparError for one that no export has made."""
    if (partial / _MARK).is_file():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise AutoparError(
            f"The export would write to {partial}, which is there and not of an export: move it, or export to a folder "
            "of another name."
        ) from None
    (partial / _MARK).touch()


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
    state, further = _torch.entries_here(model.state_dict()), ties(model)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise AutoparError(
            f"{few(others)} of the state dict is no tensor, which safetensors cannot hold; save a checkpoint "
            "(autopar.checkpoint.save_checkpoint)."
        )
    unknown = [name for name, value in state.items() if not dtype_name(value.dtype)]
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
        pointer = _torch.local_of(tensor).untyped_storage().data_ptr()
        is_apart = tensor.is_contiguous() and not (pointer and pointer in seen)  # 0 has no memory
        found[name] = tensor.detach() if is_apart else _torch.copied(tensor.detach())
        seen.add(pointer)
    return found


def _finish(partial: Path, target: Path, numbers: Mapping[str, int], model: nn.Module) -> None:
    """Joins the shards of all ranks, and moves plain files and configurations into the target folder."""
    for config in _configs(model):
        config.save_pretrained(str(partial))
    shards = sorted(str(file) for file in partial.glob("*.safetensors"))
    (partial / INDEX).write_text(json.dumps(_join(shards, partial, numbers), indent=2))
    for shard in shards:
        os.unlink(shard)
    target.mkdir(parents=True, exist_ok=True)
    # The old index goes first and the new one comes last, so that no index ever lists old and new files.
    for old in (target / INDEX, target / ONE_FILE, *target.glob(_JOINED)):
        old.unlink(missing_ok=True)
    own = [file for file in partial.iterdir() if file.name != _MARK]
    for file in sorted(own, key=lambda file: file.name == INDEX):
        os.replace(file, target / file.name)
    shutil.rmtree(partial)


def _join(shards: Sequence[str], folder: Path, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Writes whole tensors to plain files, one at a time; returns the index of these files.

    The function for this in torch 2.13 writes tensors of shape `()` as zeros, and fails for integers.
    """
    metadata = reader_of(shards).read_metadata()
    weight_map: dict[str, str] = {}
    total_bytes = 0
    opened = functools.lru_cache(_OPEN_FILES)(functools.partial(safe_open, framework="pt"))
    for number in sorted(set(numbers.values())):
        names = [name for name in numbers if numbers[name] == number]
        file = folder / f"model-{number:05d}-of-{max(numbers.values()):05d}.safetensors"
        kinds: dict[str, Any] = {name: metadata.state_dict_metadata[name] for name in names}  # of tensors alone
        entries = entries_of({name: (kind.size, kind.properties.dtype) for name, kind in kinds.items()})
        with file.open("wb") as stream:
            stream.write(header_of(entries, {"format": "pt"}))
            for name in names:
                whole = _whole(name, kinds[name], metadata.storage_data, opened)
                stream.write(whole.reshape(-1).view(torch.uint8).numpy().data)
                total_bytes += whole.nbytes
        weight_map.update(dict.fromkeys(names, file.name))
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


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
