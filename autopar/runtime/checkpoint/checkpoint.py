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

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.checkpoint.checkpoint_keeper import Checkpoints, LastCheckpoint
from autopar.runtime.checkpoint.checkpoint_loading import load
from autopar.runtime.checkpoint.checkpoint_saving import Save, catch_up, collect, compare_replicas, progress
from autopar.runtime.formats.block_states import fill_states, set_values, values_of
from autopar.runtime.formats.checkpoint_folder import located, opened
from autopar.runtime.formats.optimizer_state import Restorer, placed_like, plain_groups
from autopar.runtime.formats.weights import few
from autopar.runtime.ranks.all_ranks import AllRanks

PathLike = str | os.PathLike[str]

__all__ = ["Checkpoints", "LastCheckpoint", "load_checkpoint", "load_optimizer_state", "read_extra", "save_checkpoint"]


def save_checkpoint(
    path: PathLike, model: nn.Module, optimizer: Optimizer | None = None, *, only_optimizer: bool = False, **extra: Any
) -> None:
    """Saves a model, with everything needed to continue training as if nothing had happened.

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
    folder, model = Path(path).resolve(), _torch.uncompiled(model)
    ranks = AllRanks(f"Saving {folder}")
    compare_replicas(model)
    tensors, notes = ranks.each(lambda: collect(model, optimizer, extra, with_model=not only_optimizer))
    save = Save.begin(ranks, folder, tensors, notes)
    ranks.each(save.write)
    ranks.first_alone(save.commit)


def load_checkpoint(
    path: PathLike, model: nn.Module, optimizer: Optimizer | None = None, *, check_bytes: bool = True
) -> dict[str, Any]:
    """Loads what `save_checkpoint` saved, under this plan or another, or into a plain module.

    Every rank calls this. A compiled module needs its plan first, from `example_inputs` or `prepare`:
    values are read to where the plan has put the parameters.

    Args:
        path: the folder of the checkpoint.
        model: module to load into, compiled or not.
        optimizer: optimizer of the model's parameters; None to load the model alone.
        check_bytes: whether every byte is compared with its checksum before the model is touched, for which it is read
            twice. False leaves that out, where the store compares checksums itself; a bit that changed is then loaded.

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
    extra: dict[str, Any] = load(Path(path).resolve(), _torch.uncompiled(model), optimizer, checked=not check_bytes)[
        "extra"
    ]
    return extra


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
    ranks = AllRanks(f"Reading {path}")
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
    progress(model)
    catch_up(model, optimizer)
    fill_states(optimizer)
    groups = plain_groups(model, optimizer, state)
    names = {number: name for (own, _), numbers in groups for name, number in zip(own, numbers, strict=True)}
    restorer = Restorer(model, optimizer, [group for group, _ in groups], {})
    parameters = restorer.sources()
    ranks = AllRanks("Loading the optimizer's state")
    unknown = sorted({names[number] for number in state["state"]} - {*parameters})
    nobodys = set.intersection(*map(set, ranks.everyones(unknown)))
    if nobodys:
        raise AutoparError(
            f"The optimizer's state has {few(sorted(nobodys))}, but no parameter here has these names. Make the plain "
            "optimizer from named_parameters() of the model itself, without its wrapper."
        )
    formats = restorer.formats()
    states = {
        names[number]: _placed(names[number], parameters[names[number]], values, formats)
        for number, values in state["state"].items()
        if names[number] in parameters
    }
    restorer.restore(states)


def _placed(
    name: str, parameter: nn.Parameter, values: Mapping[str, Any], formats: Mapping[tuple[str, str], Tensor]
) -> dict[str, Any]:
    """One parameter's state, its tensors as the parameter lies; AutoparError for values that do not fit it."""
    for key, value in values.items():
        if not _is_state(value):
            raise AutoparError(
                f"{key} of {name} is a {type(value).__name__} in the optimizer's state, but only tensors, numbers, "
                "texts and lists of tensors can be loaded. Make it one of these before the state is saved."
            )
        if isinstance(value, Tensor) and value.ndim == parameter.ndim > 0:
            fits = all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
            if not fits:
                raise AutoparError(
                    f"{key} of {name} has shape {list(value.shape)} in the optimizer's state, but the parameter has "
                    f"{list(parameter.shape)}. The state belongs to another model, or to parameters in another order."
                )
    placed = {
        key: placed_like(parameter, key, values_of(value)) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }
    for key in placed:
        if (name, key) in formats:
            set_values(formats[name, key], placed[key])
    return placed


def _is_state(value: object) -> bool:
    """Whether an optimizer may keep such a value of a parameter; LBFGS keeps lists of tensors."""
    if isinstance(value, list):
        return all(x is None or isinstance(x, Tensor) for x in value)
    return value is None or isinstance(value, (Tensor, int, float, str))
