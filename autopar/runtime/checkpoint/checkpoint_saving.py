"""Saving: what a rank has to save, and the steps in which all ranks write it.

parts = ranks.each(lambda: collect(model, optimizer, extra))      what there is
save = Save.begin(ranks, folder, *parts)                          who writes which part; every rank waits
save.stage(host)                                                  a copy on the host, if training is to go on
save.write()                                                      this rank's file; no rank waits
save.commit()                                                     the first rank, once all have written
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar import _torch
from autopar._torch import pytree
from autopar.errors import AutoparError, first_line
from autopar.runtime.formats.block_states import cuts_of, entries
from autopar.runtime.formats.checkpoint_folder import VERSION, beside, clear, commit, load_plain
from autopar.runtime.formats.optimizer_state import read_state, ties
from autopar.runtime.formats.shard_file import ShardPart, write_shard
from autopar.runtime.formats.weights import few
from autopar.runtime.formats.weights_export import apart
from autopar.runtime.model.module import CompiledModule
from autopar.runtime.ranks.all_ranks import AllRanks
from autopar.runtime.replicas.meetings import Meetings

Host = dict[MetadataIndex, Tensor]  # copies in the host's memory, by what torch calls a part of a tensor


MOMENTUM = "outer_momentum."  # begins the names of what the outer optimizer of replicas keeps


class StagedPlanner(dcp.DefaultSavePlanner):
    """Gives the writer the values to write: the model's tensors, or their copies once these are staged."""

    _host: Host | None = None

    def stage(self, plan: dcp.SavePlan, host: Host) -> None:
        """Copies the values that this rank writes to the host, and drops the references to the model's tensors.

        Args:
            plan: the parts that this rank writes.
            host: copies of the save before, whose memory is used again; afterwards those of this save.
        """
        parts = {item.index: self.lookup_object(item.index).detach() for item in plan.items}
        for index in host.keys() - parts.keys():
            del host[index]
        for index, value in parts.items():
            if index not in host or (host[index].shape, host[index].dtype) != (value.shape, value.dtype):
                host[index] = torch.empty(value.shape, dtype=value.dtype, pin_memory=not value.is_cpu)
            host[index].copy_(value, non_blocking=True)
        if any(not value.is_cpu for value in parts.values()):
            torch.accelerator.synchronize()
        self._host, self.state_dict = host, {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value of a part."""
        return super().lookup_object(index) if self._host is None else self._host[index]


@dataclass(frozen=True)
class Save:
    """One rank's side of a save, see [Note: a save is all or nothing].

    Attributes:
        folder: the folder of the checkpoint.
        file: this rank's file.
        planner: values of the parts.
        plan: parts that this rank writes.
        whole: all parts of all ranks and the merged notes, on the first rank; None on the others.
    """

    folder: Path
    file: Path
    planner: StagedPlanner
    plan: dcp.SavePlan
    whole: tuple[Metadata, dict[str, Any]] | None

    @classmethod
    def begin(cls, ranks: AllRanks, folder: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> Save:
        """Clears the folder for a save, and divides the tensors to write among ranks; every rank calls it.

        Args:
            ranks: all ranks.
            folder: the folder of the checkpoint.
            tensors: what this rank has, by its name on disk.
            notes: what is small of this rank, as `collect` gives it.
        """
        partial = beside(folder, "partial")
        ranks.first_alone(lambda: clear(folder, partial))
        planner = StagedPlanner()

        def own_plan() -> dcp.SavePlan:
            partial.mkdir(parents=True, exist_ok=True)
            planner.set_up_planner(tensors, is_coordinator=ranks.first)
            return planner.create_local_plan()

        every = ranks.at_first((ranks.each(own_plan), notes))

        def shared_out() -> tuple[list[dcp.SavePlan], tuple[Metadata, dict[str, Any]] | None]:
            if not ranks.first:
                return [], None
            plans, metadata = planner.create_global_plan([plan for plan, _ in every])
            return plans, (metadata, _merged([own for _, own in every]))

        plans, whole = ranks.each(shared_out)
        plan = planner.finish_plan(ranks.from_first(plans))
        file = partial / f"shard-{ranks.rank + 1:05d}.safetensors"
        return cls(folder, file, planner, plan, whole)

    def stage(self, host: Host) -> None:
        """Copies the tensors that this rank writes to the host, so that training can continue during the write."""
        self.planner.stage(self.plan, host)

    def write(self, rest: Callable[[], None] | None = None) -> None:
        """Writes this rank's file, with rests as `write_shard` takes them; no rank waits for another."""
        parts = {
            item.index.fqn: ShardPart(self.planner.lookup_object(item.index), item.index.offset or ())
            for item in self.plan.items
        }
        # The first rank has a file in any case: it shows that the folder is a checkpoint's.
        if parts or self.whole is not None:
            write_shard(self.file, parts, rest)

    def commit(self) -> None:
        """Gives the checkpoint its name; the first rank calls it, after all ranks have written."""
        assert self.whole is not None, "this is the first rank"
        planned, notes = self.whole
        commit(beside(self.folder, "partial"), self.folder, planned, notes)


def collect(
    model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any], *, with_model: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that this rank saves: tensors by their names on disk, and the rest."""
    steps, meetings = progress(model), meetings_of(model)
    if meetings is not None:
        meetings.require("Saving a checkpoint")
    if optimizer is None and not with_model:
        raise AutoparError(
            "save_checkpoint was called with only_optimizer=True but no optimizer, so there is nothing to save. Give "
            "the optimizer, or leave only_optimizer out."
        )
    state = _torch.entries_here(model.state_dict()) if with_model else {}
    tensors = {f"model.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    _refuse_sparse(tensors)
    notes: dict[str, Any] = {
        "version": VERSION,
        "extra": extra,
        "has_model": with_model,
        "progress": steps,
        "ties": ties(model),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "objects": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        "values": {},
        "groups": [],
        "loops": [],  # of a training loop, see [Note: the loop's own state]
        "blocks": {},
    }
    if optimizer is not None:
        catch_up(model, optimizer)
        found = read_state(model, optimizer)
        notes.update(values=found.values, groups=found.groups, blocks=cuts_of(found.tensors))
        own = meetings.prefix if meetings is not None else ""
        for name, key, tensor in entries(found.tensors):
            tensors[f"{own}optimizer.{name}.{key}"] = tensor
    if meetings is not None:
        tensors |= {f"{MOMENTUM}{k}": v for k, v in meetings.outer_momentum().items()}
    for key, value in extra.items():
        _refuse_unloadable(f"extra value {key!r}", value)
    for what in ("objects", "values", "groups"):
        _refuse_unloadable(f"{what} of model and optimizer", notes[what])
    return apart(tensors), notes


def compare_replicas(model: nn.Module) -> None:
    """Looks whether ranks that hold the same parameters have drifted apart; then does what `drift=` asks for."""
    if isinstance(model, CompiledModule):
        model._runs.drift.compare("before a save")


def meetings_of(model: nn.Module) -> Meetings | None:
    """The meetings of a compiled module's replicas, if it has any."""
    return model._meetings if isinstance(model, CompiledModule) else None


def progress(model: nn.Module) -> dict[str, Any] | None:
    """The progress of a compiled module, from which random ops continue."""
    if not isinstance(model, CompiledModule):
        return None
    _ = model.plan  # raises PlanError where there is none
    return {"steps": model._runs.steps, "seeds": torch.get_rng_state(), "loss_scale": model._runs.scaler.state()}


def catch_up(model: nn.Module, optimizer: Optimizer) -> None:
    """Gives an optimizer that was made early, and not stepped since, the parameters that are there now."""
    if isinstance(model, CompiledModule) and model._placement.adoption is not None:
        model._placement.adoption.follow(optimizer)


def _refuse_sparse(tensors: Mapping[str, Tensor]) -> None:
    """Raises AutoparError for a tensor that files of dense tensors cannot hold."""
    sparse = [name.removeprefix("model.") for name, x in tensors.items() if x.layout is not torch.strided]
    if sparse:
        raise AutoparError(
            f"{few(sparse)} of the model cannot be saved: a checkpoint holds dense tensors alone. Register a sparse "
            "buffer with persistent=False and make it anew at the start, or save it as dense values and indices."
        )


def _refuse_unloadable(what: str, value: Any) -> None:
    """Raises AutoparError for what could not be loaded again with `weights_only`."""
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
        raise AutoparError(
            f"The {what} holds a DTensor, of which the first rank has only a part; save full values, or let the model "
            "or the optimizer save it."
        )
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load_plain(buffer)
    except Exception as error:  # whatever pickling the caller's objects raises
        raise AutoparError(
            f"The {what} cannot be saved so that it loads without running code: {first_line(error)} Numbers, text, "
            "lists, dicts and tensors can be."
        ) from error


def _merged(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The notes of all ranks as one: each knows the parameters it holds."""
    if not every:
        return {}
    merged = dict(every[0])
    for key in ("ties", "shapes", "objects", "values", "blocks"):
        merged[key] = {name: value for notes in reversed(every) for name, value in notes[key].items()}
    merged["loops"] = [loop for notes in every for loop in notes["loops"]]
    known: set[str] = set()
    merged["groups"] = []
    for names, options in (group for notes in every for group in notes["groups"]):
        new = [name for name in names if name not in known]
        known.update(new)
        if new:
            merged["groups"].append((new, options))
    return merged
