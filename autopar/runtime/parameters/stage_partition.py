"""The part of a model that one pipeline rank holds: the parameters of its stages, and all buffers.

In the places of others are stand-ins without memory (`autopar._torch.distributed.elsewhere`), so that `parameters()`,
`state_dict()`, optimizers and what a script does with them are the same on every rank.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from autopar import _torch
from autopar._torch import pytree
from autopar.errors import StepError
from autopar.ir import Pipeline
from autopar.program.program import Program
from autopar.runtime.ranks.world import World

Users = Mapping[str, Sequence[int]]
_RANK = "autopar_rank"  # in the metadata of a state dict: whose shards it has


def is_averaged() -> bool:
    """Whether the caller runs for a copy that AveragedModel makes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is AveragedModel.__init__.__code__:
            return True
        frame = frame.f_back
    return False


class RankState(OrderedDict[str, Any]):
    """The state dict of a compiled module on one rank, which is not a file of the model if it has shards.

    `torch.save` writes replicated tensors as plain ones, and raises StepError for shards: a script that saves under one
    name on every rank would overwrite those of the others. `shards()` may be saved, under a name for each rank.
    """

    _metadata: dict[str, Any] | None = None  # as nn.Module.state_dict gives it, with the rank

    def shards(self) -> OrderedDict[str, Any]:
        """What this rank has of the entries, in a dict that `torch.save` writes as it is."""
        found = OrderedDict((name, _torch.for_a_file(x)) for name, x in _torch.entries_here(self).items())
        found._metadata = self._metadata  # type: ignore[attr-defined]
        return found

    def with_entries(self, entries: Mapping[str, Any]) -> RankState:
        """Other entries of this rank."""
        found = RankState(entries)
        found._metadata = self._metadata
        return found

    def copy(self) -> RankState:
        return self.with_entries(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> RankState:
        return self.with_entries(deepcopy(dict(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = [k for k, x in self.items() if isinstance(x, DTensor) and _torch.is_part(x)]
        if parts:
            raise StepError(_not_whole(parts))
        found = OrderedDict(self)
        found._metadata = self._metadata  # type: ignore[attr-defined]
        return found.__reduce_ex__(protocol)


pytree.register_pytree_node(
    RankState,
    lambda state: (list(state.values()), state),
    lambda values, state: state.with_entries(dict(zip(state, values, strict=True))),
)


def _not_whole(names: Sequence[str]) -> str:
    return (
        f"A state dict was given to torch.save or pickle, but this rank has {names[0]} and {len(names) - 1} more of "
        "its entries in shards or not at all: such a file is not the model, and ranks that save under one name "
        "overwrite each other's files. Save with autopar.checkpoint.save_checkpoint(folder, model) or "
        "model.export(folder) on all ranks (docs/checkpoints.md). For one file a rank: "
        "torch.save(model.state_dict().shards(), a name with the rank)."
    )


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """A state dict that knows whose shards it has."""
    if not hasattr(state, "_metadata"):  # the caller gave a plain dict to fill
        return state
    state._metadata.setdefault("", {})[_RANK] = rank
    found = RankState(state)
    found._metadata = state._metadata
    return found


def refuse_shards_of_others(given: Mapping[str, Any], rank: int) -> None:
    """Raises StepError for a state dict with shards of another rank, as one file for all ranks has them."""
    source = (getattr(given, "_metadata", None) or {}).get("", {}).get(_RANK, rank)
    if source == rank:
        return
    shards = [k for k, v in given.items() if isinstance(v, DTensor) and _torch.has_shards(v)]
    if shards:
        raise StepError(
            f"load_state_dict on rank {rank} was given the state dict of rank {source}, whose {shards[0]} and "
            f"{len(shards) - 1} more are that rank's shards: the shards of the others are not in it. Save with "
            "autopar.checkpoint.save_checkpoint(folder, model, optimizer) on all ranks (docs/checkpoints.md), or save "
            "x.full_tensor() of each parameter."
        )


def as_stored(given: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Cuts the whole tensors of a state dict by the placements of the model's parameters with the same names.

    Entries of other ranks need not be given, as in the files of `RankState.shards`; a dict that has one of them has to
    have all.
    """
    source, present = given, dict(model.named_parameters(remove_duplicate=False))
    absent = {k: x for k, x in present.items() if _torch.is_elsewhere(x)}
    if absent.keys().isdisjoint(given):
        given = {**absent, **given}
    cut = {
        k: _torch.cut_like(given[k], x)
        for k, x in present.items()
        if isinstance(x, DTensor) and _is_whole(given.get(k)) and given[k].shape == x.shape
    }
    found = OrderedDict({**given, **cut})
    if metadata := getattr(source, "_metadata", None):  # versions of modules
        found._metadata = metadata  # type: ignore[attr-defined]
    return found


def _is_whole(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor)


def users_of(model: nn.Module, stages: Sequence[Program]) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the stages that use it; the first stage keeps parameters that no stage uses."""
    users: dict[str, tuple[int, ...]] = {}
    for number, program in enumerate(stages):
        for spec in program.parameters:
            users[spec.name] = (*users.get(spec.name, ()), number)
    return {name: users.get(name, (0,)) for name, _ in model.named_parameters()}


def held_by(rank: int, users: Users, pipeline: Pipeline) -> frozenset[str]:
    """The parameters that a pipeline rank holds."""
    return frozenset(name for name, own in users.items() if rank in map(pipeline.rank_of, own))


def take_part(model: nn.Module, users: Users, pipeline: Pipeline, world: World) -> frozenset[str]:
    """Frees the parameters that other pipeline ranks hold, which stay as stand-ins for these.

    Returns the parameters of this rank that an earlier rank of the pipeline holds too.
    """
    assert world.pipe is not None and world.device_mesh is not None
    rank = world.pipe.rank
    holders = {name: frozenset(map(pipeline.rank_of, own)) for name, own in users.items()}
    for name, parameter in list(model.named_parameters()):
        if rank not in holders[name]:
            has_gradient, parameter.grad = parameter.grad is not None, None
            others = _torch.elsewhere(parameter, world.device_mesh, holders[name], world.device)
            torch.utils.swap_tensors(parameter, others)
            if has_gradient:
                parameter.grad = torch.zeros_like(parameter)
        del parameter
    return frozenset(name for name, own in holders.items() if min(own) < rank)
