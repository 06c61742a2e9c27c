"""Checkpoints: a model and its optimizer on disk, named and shaped as in the original model.

A checkpoint is a folder:

    shard-*.safetensors    tensors, every rank's own parts, as torch.distributed.checkpoint lays them out:
                           `model.<name>` and `optimizer.<parameter>.<key>`
    state.pt               what is small: the optimizer's options, random state, the caller's values

No plan is in it, so it can be loaded under any other. Nothing in it is run when it is loaded:
safetensors are plain bytes, and `state.pt` is read with `weights_only=True`. (The usual format of
torch.distributed.checkpoint has a file `.metadata`, which torch reads with plain pickle.)
"""

from __future__ import annotations

import io
import os
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
from autopar._torch import pytree
from autopar.errors import AutoparError
from autopar.runtime.block_states import (
    cut_of,
    cuts_of,
    entries,
    fill_states,
    in_blocks,
    parts_of,
    set_values,
    values_of,
)
from autopar.runtime.checkpoint_folder import VERSION, beside, clear, commit, located, opened
from autopar.runtime.module import CompiledModule
from autopar.runtime.optimizer_state import (
    Restorer,
    empty_like,
    placed_like,
    plain_groups,
    read_state,
    ties,
)
from autopar.runtime.together import Together
from autopar.runtime.weights import apart, few

PathLike = str | os.PathLike[str]


def save_checkpoint(
    path: PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    only_optimizer: bool = False,
    **extra: Any,
) -> None:
    """Saves a model, and what it takes to train on as if nothing had happened.

    Every rank calls this, with a path that all of them see. A checkpoint that is there already is
    replaced once the new one is complete, see [Note: a save is all or nothing].

    Args:
        path: a folder for this checkpoint alone.
        model: a compiled module that has its plan, or any module; of what `torch.compile` gave, the
            module inside.
        optimizer: optimizer of the model's parameters; None to save the model alone.
        only_optimizer: whether the model's own state is left out, because it is saved elsewhere; needs
            an optimizer.
        extra: small values to have back from `load_checkpoint`: numbers, text, lists, dicts, tensors
            (`step=7, scheduler=scheduler.state_dict()`). Those of the first rank are kept.

    Raises AutoparError on every rank for what cannot be saved or written, naming the rank and the
    reason; PlanError for a compiled module without a plan; PeerError if another rank died or hangs.

    >>> import autopar, tempfile, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     autopar.checkpoint.save_checkpoint(f"{folder}/last", model, step=7)
    ...     autopar.checkpoint.load_checkpoint(f"{folder}/last", torch.nn.Linear(4, 2))
    {'step': 7}
    """
    folder = Path(path).resolve()
    partial, model = beside(folder, "partial"), _torch.uncompiled(model)
    ranks = Together(f"Saving {folder}")
    tensors, notes = ranks.each(
        lambda: _collect(model, optimizer, extra, with_model=not only_optimizer)
    )
    ranks.first_alone(lambda: clear(folder, partial))
    writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with ranks.naming_failures():
        planned = dcp.save(tensors, storage_writer=writer, no_dist=ranks.alone)
    every = ranks.at_first(notes)
    ranks.first_alone(lambda: commit(partial, folder, planned, _merged(every)))


def load_checkpoint(
    path: PathLike, model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Loads what `save_checkpoint` saved, under this plan or another, or into a plain module.

    Every rank calls this. A compiled module needs its plan first, from `example_inputs` or `prepare`:
    values are read to where the plan has put the parameters.

    Returns:
        The `extra` values, their tensors on the CPU.

    Raises AutoparError on every rank for a checkpoint that is missing, damaged or of another model,
    naming what differs; PlanError for a compiled module without a plan; PeerError if another rank
    died or hangs.

    >>> import autopar, tempfile, torch
    >>> saved, loaded = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     autopar.checkpoint.save_checkpoint(f"{folder}/last", saved)
    ...     autopar.checkpoint.load_checkpoint(f"{folder}/last", loaded)
    {}
    >>> torch.equal(saved.weight, loaded.weight)
    True
    """
    ranks, model = Together(f"Loading {path}"), _torch.uncompiled(model)
    loading = ranks.each(lambda: _Loading.begin(Path(path).resolve(), model, optimizer))
    _refuse_unknown(ranks.everyones(loading.unknown()), path)
    reader = dcp.HuggingFaceStorageReader(str(loading.folder))
    with ranks.naming_failures():
        dcp.load(loading.room, storage_reader=reader, no_dist=ranks.alone)
    ranks.each(loading.finish)
    return loading.notes["extra"]


def read_extra(path: PathLike) -> dict[str, Any]:
    """The `extra` values of a checkpoint alone, their tensors on the CPU; every rank calls it.

    Raises AutoparError on every rank for a checkpoint that is missing or damaged; PeerError if another rank died or
    hangs.

    >>> import autopar, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     autopar.checkpoint.save_checkpoint(f"{folder}/last", torch.nn.Linear(4, 2), step=7)
    ...     autopar.checkpoint.read_extra(f"{folder}/last")
    {'step': 7}
    """
    ranks = Together(f"Reading {path}")
    notes, _ = ranks.each(lambda: opened(located(Path(path).resolve())))
    extra: dict[str, Any] = notes["extra"]
    return extra


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the `state_dict()` of a plain optimizer, with whole tensors, into one whose parameters are shards.

    Every rank calls this with the same state; each keeps its own parts. Parameters are found by their names, if
    the plain optimizer was made of `named_parameters()`, else by their order, for which both optimizers need
    the same groups.

    Raises AutoparError for other groups or shapes; PlanError for a compiled module without a plan.

    >>> import autopar, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> before, after = (torch.optim.AdamW(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    >>> autopar.checkpoint.load_optimizer_state(model, after, before.state_dict())
    >>> after.param_groups[0]["lr"]
    0.1
    """
    model = _torch.uncompiled(model)
    _progress(model)
    _catch_up(model, optimizer)
    fill_states(optimizer)
    groups = plain_groups(model, optimizer, state)
    names = {
        number: name
        for (own, _), numbers in groups
        for name, number in zip(own, numbers, strict=True)
    }
    restorer = Restorer(model, optimizer, [group for group, _ in groups], {})
    parameters = restorer.sources()
    ranks = Together("Loading the optimizer's state")
    unknown = sorted({names[number] for number in state["state"]} - {*parameters})
    nobodys = set.intersection(*map(set, ranks.everyones(unknown)))
    if nobodys:
        raise AutoparError(
            f"The optimizer's state has {few(sorted(nobodys))}, which no parameter here is called. Make the "
            "plain optimizer of the named_parameters() of the model itself, without what wraps it."
        )
    formats = restorer.formats()
    states = {
        names[number]: _placed(names[number], parameters[names[number]], values, formats)
        for number, values in state["state"].items()
        if names[number] in parameters
    }
    restorer.restore(states)


def _placed(
    name: str,
    parameter: nn.Parameter,
    values: Mapping[str, Any],
    formats: Mapping[tuple[str, str], Tensor],
) -> dict[str, Any]:
    """One parameter's state, its tensors as the parameter lies; AutoparError for tensors of another parameter."""
    for key, value in values.items():
        if isinstance(value, Tensor) and value.ndim == parameter.ndim > 0:
            fits = all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
            if not fits:
                raise AutoparError(
                    f"{key} of {name} has shape {list(value.shape)} in the optimizer's state, and the parameter has "
                    f"{list(parameter.shape)}. It is the state of another model, or its parameters have another order."
                )
    placed = {
        key: placed_like(parameter, key, values_of(value)) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }
    for key in placed:
        if (name, key) in formats:
            set_values(formats[name, key], placed[key])
    return placed


# --- saving


def _collect(
    model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any], *, with_model: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that this rank saves: tensors by their names on disk, and the rest."""
    progress = _progress(model)
    if optimizer is None and not with_model:
        raise AutoparError(
            "save_checkpoint was called with only_optimizer=True and no optimizer, so that there is "
            "nothing to save. Give the optimizer, or leave only_optimizer out."
        )
    state = model.state_dict() if with_model else {}
    tensors = {f"model.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    notes: dict[str, Any] = {
        "version": VERSION,
        "extra": extra,
        "has_model": with_model,
        "progress": progress,
        "ties": ties(model),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "objects": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        "values": {},
        "groups": [],
        "blocks": {},
    }
    if optimizer is not None:
        _catch_up(model, optimizer)
        found = read_state(model, optimizer)
        notes.update(values=found.values, groups=found.groups, blocks=cuts_of(found.tensors))
        for name, key, tensor in entries(found.tensors):
            tensors[f"optimizer.{name}.{key}"] = tensor
    for key, value in extra.items():
        _refuse_unloadable(f"extra value {key!r}", value)
    for what in ("objects", "values", "groups"):
        _refuse_unloadable(f"the {what} of model and optimizer", notes[what])
    return apart(tensors), notes


def _progress(model: nn.Module) -> dict[str, Any] | None:
    """The progress of a compiled module, from which random ops continue."""
    if not isinstance(model, CompiledModule):
        return None
    _ = model.plan  # raises PlanError where there is none
    return {"steps": model._steps, "seeds": torch.get_rng_state()}


def _catch_up(model: nn.Module, optimizer: Optimizer) -> None:
    """Gives an optimizer that was made early, and not stepped since, the parameters that are there now."""
    if isinstance(model, CompiledModule) and model._placement.adoption is not None:
        model._placement.adoption.follow(optimizer)


def _refuse_unloadable(what: str, value: Any) -> None:
    """Raises AutoparError for what could not be loaded again with `weights_only`."""
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
        raise AutoparError(
            f"The {what} holds a DTensor, of which the first rank has a part only; save full values, "
            "or leave it to the model and the optimizer."
        )
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # whatever pickling the caller's objects raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AutoparError(
            f"The {what} cannot be saved so that it loads without running code: {reason} Numbers, text, "
            "lists, dicts and tensors can be."
        ) from error


def _merged(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The notes of all ranks as one: each knows the parameters it holds."""
    if not every:
        return {}
    merged = dict(every[0])
    for key in ("ties", "shapes", "objects", "values", "blocks"):
        merged[key] = {
            name: value for notes in reversed(every) for name, value in notes[key].items()
        }
    known: set[str] = set()
    merged["groups"] = []
    for names, options in (group for notes in every for group in notes["groups"]):
        new = [name for name in names if name not in known]
        known.update(new)
        if new:
            merged["groups"].append((new, options))
    return merged


# --- loading


@dataclass(frozen=True)
class _Loading:
    """One rank's side of a load.

    Attributes:
        folder: where the checkpoint really is.
        model: what it is loaded into.
        notes: its `state.pt`.
        saved: the tensors it has.
        room: name on disk -> tensor to read into, for all that this rank has.
        objects: entries of the model's state dict that are no tensors.
        restorer: what brings the optimizer's state home; None without an optimizer.
    """

    folder: Path
    model: nn.Module
    notes: Mapping[str, Any]
    saved: Mapping[str, TensorStorageMetadata]
    room: dict[str, Any]
    objects: list[str]
    restorer: Restorer | None

    @staticmethod
    def begin(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> _Loading:
        """Opens a checkpoint. Raises AutoparError for one that cannot be loaded here."""
        _progress(model)
        folder = located(folder)
        notes, saved = opened(folder)
        if optimizer is None and not notes.get("has_model", True):
            raise AutoparError(
                f"{folder} was saved with only_optimizer=True and has no weights. Load it with an "
                "optimizer, and the weights from where they were saved."
            )
        state = model.state_dict() if notes.get("has_model", True) else {}
        room = {f"model.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        objects = [k for k, v in state.items() if not isinstance(v, Tensor)]
        _refuse_other_model(folder, room, saved)
        restorer = None
        if optimizer is not None:
            if not notes["groups"]:
                raise AutoparError(f"{folder} was saved without an optimizer; load it without one.")
            _catch_up(model, optimizer)
            fill_states(optimizer)
            restorer = Restorer(model, optimizer, notes["groups"], notes["ties"])
            _refuse_other_shapes(folder, restorer.sources(), notes.get("shapes", {}))
            room.update(_optimizer_room(restorer, saved, notes.get("blocks", {})))
        return _Loading(folder, model, notes, saved, room, objects, restorer)

    def unknown(self) -> list[str]:
        """Saved tensors of the model that this rank has no place for."""
        return sorted(k for k in self.saved if k.startswith("model.") and k not in self.room)

    def finish(self) -> None:
        """Gives what was read to whom it belongs."""
        model, notes = self.model, self.notes
        tensors = {
            k.removeprefix("model."): v for k, v in self.room.items() if k.startswith("model.")
        }
        if notes.get("has_model", True):
            model.load_state_dict({**tensors, **{k: notes["objects"][k] for k in self.objects}})
        if self.restorer is not None:
            self.restorer.restore(self._optimizer_states())
        if isinstance(model, CompiledModule) and notes["progress"] is not None:
            model._steps = notes["progress"]["steps"]
            torch.set_rng_state(notes["progress"]["seeds"])

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
    folder: Path, room: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]
) -> None:
    problems = []
    for name, tensor in room.items():
        own = name.removeprefix("model.")
        if name not in saved:
            problems.append(f"{own} is not in it")
        elif saved[name].size != tensor.shape:
            problems.append(
                f"{own} has shape {list(saved[name].size)} in it and {list(tensor.shape)} in the model"
            )
    if problems:
        raise AutoparError(f"The checkpoint {folder} is of another model: {few(problems)}.")


def _refuse_unknown(every: Sequence[list[str]], path: PathLike) -> None:
    """Raises AutoparError for tensors that no rank has a place for."""
    unknown = sorted(set(every[0]).intersection(*every))
    if unknown:
        names = few([name.removeprefix("model.") for name in unknown])
        raise AutoparError(
            f"The checkpoint {path} is of another model: it has {names}, which the model lacks."
        )


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
    restorer: Restorer,
    saved: Mapping[str, TensorStorageMetadata],
    cuts: Mapping[str, Sequence[str]],
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
