"""Loading: from the parts on disk to where the plan has put parameters and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.checkpoint_saving import MOMENTUM, catch_up, meetings_of, progress
from autopar.runtime.formats.block_states import cut_of, fill_states, in_blocks, parts_of, set_values
from autopar.runtime.formats.checkpoint_folder import check_bytes, located, opened
from autopar.runtime.formats.optimizer_state import Restorer, empty_like
from autopar.runtime.formats.shard_reader import ShardReader
from autopar.runtime.formats.weights import few
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.ranks.all_ranks import AllRanks


def load(folder: Path, model: nn.Module, optimizer: Optimizer | None, *, checked: bool = False) -> Mapping[str, Any]:
    """Loads a checkpoint and returns its `state.pt`; every rank calls it.

    Args:
        folder: folder of the checkpoint.
        model: what it is loaded into; a checkpoint that is refused leaves it as it was.
        optimizer: optimizer of the model's parameters, if its state is to be loaded.
        checked: whether the bytes are taken as they are, such as where `check_bytes` has found no damage already.
    """
    ranks = AllRanks(f"Loading {folder}")
    loading = ranks.each(lambda: Loading.begin(folder, model, optimizer))
    _refuse_unknown(ranks.everyones(loading.unknown()), folder)
    own = ranks.share(sorted(loading.saved))
    ranks.each(lambda: None if checked else check_bytes(loading.folder, loading.notes, own))
    reader = ShardReader(str(loading.folder))
    with ranks.naming_failures():
        dcp.load(loading.room_on_disk, storage_reader=reader, no_dist=ranks.alone)
    ranks.each(loading.finish)
    return loading.notes


@dataclass(frozen=True)
class Loading:
    """One rank's side of a load.

    Attributes:
        folder: where the checkpoint really is.
        model: what it is loaded into.
        notes: its `state.pt`.
        saved: the tensors it has.
        room: name -> tensor to read into, for all that this rank has.
        objects: entries of the model's state dict that are not tensors.
        restorer: what brings the optimizer's state home; None without an optimizer.
        prefix: beginning of the names on disk of the optimizer's state of this rank's replica; "" for the first one.
    """

    folder: Path
    model: nn.Module
    notes: Mapping[str, Any]
    saved: Mapping[str, TensorStorageMetadata]
    room: dict[str, Any]
    objects: list[str]
    restorer: Restorer | None
    prefix: str = ""

    @staticmethod
    def begin(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> Loading:
        """Opens a checkpoint. Raises AutoparError for one that cannot be loaded here."""
        progress(model)
        folder = located(folder)
        notes, saved = opened(folder)
        if optimizer is None and not notes.get("has_model", True):
            raise AutoparError(
                f"{folder} was saved with only_optimizer=True and has no weights. Load it with an optimizer, and load "
                "the weights from where they were saved."
            )
        state = _torch.entries_here(model.state_dict()) if notes.get("has_model", True) else {}
        room = {f"model.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        objects = [k for k, v in state.items() if not isinstance(v, Tensor)]
        _refuse_other_model(folder, room, saved, [name for name in objects if name not in notes["objects"]])
        restorer, prefix, meetings = None, "", meetings_of(model)
        if meetings is not None:
            prefix = meetings.prefix if any(k.startswith(meetings.prefix) for k in saved) else ""
            kept = {f"{MOMENTUM}{k}": v for k, v in meetings.new_outer_momentum().items()}
            room.update({name: x for name, x in kept.items() if name in saved})
        if optimizer is not None:
            if not notes["groups"]:
                raise AutoparError(f"{folder} was saved without an optimizer; load it without one.")
            catch_up(model, optimizer)
            fill_states(optimizer)
            restorer = Restorer(model, optimizer, notes["groups"], notes["ties"])
            _refuse_other_shapes(folder, restorer.sources(), notes.get("shapes", {}))
            states = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(f"{prefix}optimizer.")}
            states_room = _optimizer_room(restorer, states, notes.get("blocks", {}))
            _refuse_missing_values(folder, states_room, notes["values"])
            room.update(states_room)
        return Loading(folder, model, notes, saved, room, objects, restorer, prefix)

    @property
    def room_on_disk(self) -> dict[str, Any]:
        """`room` by the names that tensors have on disk."""
        return {self.prefix * k.startswith("optimizer.") + k: v for k, v in self.room.items()}

    def unknown(self) -> list[str]:
        """Saved tensors of the model that this rank has no place for."""
        return sorted(k for k in self.saved if k.startswith("model.") and k not in self.room)

    def finish(self) -> None:
        """Copies the loaded values to the model, the optimizer and the other objects."""
        model, notes = self.model, self.notes
        read = {k.removeprefix("model."): v for k, v in self.room.items() if k.startswith("model.")}
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        # What was read in place is given as the model's own tensor, which torch does not copy onto itself.
        tensors = {k: own[k] if _is_same(own.get(k), x) else x for k, x in read.items()}
        if notes.get("has_model", True):
            model.load_state_dict({**tensors, **{k: notes["objects"][k] for k in self.objects}})
        meetings = meetings_of(model)
        if meetings is not None:
            momentum = {k.removeprefix(MOMENTUM): v for k, v in self.room.items() if k.startswith(MOMENTUM)}
            meetings.begin_again(momentum)
        if self.restorer is not None:
            self.restorer.restore(self._optimizer_states())
        if isinstance(model, CompiledModule) and notes["progress"] is not None:
            model._runs.steps = notes["progress"]["steps"]
            torch.set_rng_state(notes["progress"]["seeds"])
            model._runs.scaler.load(notes["progress"].get("loss_scale"))

    def _optimizer_states(self) -> dict[str, dict[str, Any]]:
        """Parameter -> key -> tensor or value."""
        assert self.restorer is not None, "there is an optimizer"
        states = {name: dict(values) for name, values in self.notes["values"].items()}
        formats = self.restorer.formats()
        for entry, tensor in self.room.items():
            if entry.startswith("optimizer."):
                name, key = _parameter_and_key(entry)
                key, _, part = key.partition(":")
                state = formats.get((name, key))
                if state is not None and not part:
                    set_values(state, tensor)
                states[name][key] = tensor if state is None else state
        return states


def _refuse_other_model(
    folder: Path, room: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata], missing: Sequence[str]
) -> None:
    problems = [f"{name} is not in it" for name in missing]
    for name, tensor in room.items():
        own = name.removeprefix("model.")
        if name not in saved:
            problems.append(f"{own} is not in it")
        elif saved[name].size != tensor.shape:
            problems.append(f"{own} has shape {list(saved[name].size)} in it and {list(tensor.shape)} in the model")
        elif _kind(saved[name].properties.dtype) != _kind(tensor.dtype):
            problems.append(
                f"{own} has another dtype, {saved[name].properties.dtype} in it and {tensor.dtype} in the model"
            )
    if problems:
        raise AutoparError(f"The checkpoint {folder} is of another model: {few(problems)}.")


def _refuse_missing_values(folder: Path, room: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Raises AutoparError where the tensors of a parameter's state were saved without the rest of it."""
    if missing := sorted({_parameter_and_key(entry)[0] for entry in room} - values.keys()):
        raise AutoparError(f"{folder} is damaged: it has tensors of the optimizer but no values for {few(missing)}.")


def _is_same(own: Tensor | None, x: Tensor) -> bool:
    """Whether a tensor is the memory of a model's own one."""
    if own is None or type(x) is not (DTensor if isinstance(own, DTensor) else Tensor) or x.is_meta:
        return False
    a, b = _torch.local_tensor(own), _torch.local_tensor(x)
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _refuse_unknown(every: Sequence[list[str]], folder: Path) -> None:
    """Raises AutoparError for tensors that no rank has a place for."""
    unknown = sorted(set(every[0]).intersection(*every))
    if unknown:
        names = few([name.removeprefix("model.") for name in unknown])
        raise AutoparError(f"The checkpoint {folder} is of another model: it has {names}, which the model lacks.")


def _parameter_and_key(entry: str) -> tuple[str, str]:
    name, _, key = entry.removeprefix("optimizer.").rpartition(".")
    return name, key


def _refuse_other_shapes(
    folder: Path, sources: Mapping[str, nn.Parameter], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises AutoparError for an optimizer's state of parameters that had other shapes when they were saved."""
    problems = [
        f"{name} has shape {list(shapes[name])} in it and {list(parameter.shape)} in the model"
        for name, parameter in sources.items()
        if list(shapes.get(name, parameter.shape)) != list(parameter.shape)
    ]
    if problems:
        raise AutoparError(f"The checkpoint {folder} is of another model: {few(problems)}.")


def _optimizer_room(
    restorer: Restorer, saved: Mapping[str, TensorStorageMetadata], cuts: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """Entries of the optimizer's state for this rank's parameters, see [Note: states in blocks].

    A state in blocks is read in place where the saved one had the same blocks; all other entries are empty.
    """
    sources, room = restorer.sources(), {}
    alike = {}
    for (name, key), state in restorer.formats().items():
        if not in_blocks(state):
            continue
        parts = {f"optimizer.{name}.{key}:{p}": tensor for p, tensor in parts_of(state).items()}
        is_saved = all(e in saved and saved[e].size == t.shape for e, t in parts.items())
        if is_saved and cuts.get(f"{name}.{key}") == cut_of(state):
            alike[name, key] = parts
            room.update(parts)
    for entry, found in saved.items():
        name, key = _parameter_and_key(entry)
        if not entry.startswith("optimizer.") or name not in sources or ":" in key:
            continue
        if (name, key) not in alike:
            room[entry] = empty_like(sources[name], key, found.size, found.properties.dtype)
    return room
