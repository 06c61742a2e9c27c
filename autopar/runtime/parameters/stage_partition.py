"""The part of a model that one pipeline rank holds: the parameters of its stages, and all buffers.

Parameters that lie elsewhere are None in their modules, as torch's own pipeline examples have it, so that
`parameters()`, optimizers and checkpoints see what this rank holds.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel

from autopar import _torch
from autopar._torch import pytree
from autopar.errors import StepError
from autopar.ir import Pipeline
from autopar.program.program import Program
from autopar.runtime.parameters.adoption import Adoption
from autopar.runtime.parameters.stand_ins import Absent
from autopar.runtime.ranks.all_ranks import warn_together
from autopar.runtime.ranks.world import World

Users = Mapping[str, Sequence[int]]
_RANK = "autopar_rank"  # in the metadata of a state dict: whose shards it has


@dataclass(frozen=True)
class RankPart:
    """The part of a model that this rank holds; without a pipeline, all of it.

    Attributes:
        absent: the parameters of other ranks, and where they were.
        elsewhere: entries of the model's state dict that other ranks have.
        counted_elsewhere: parameters that an earlier rank of the pipeline holds too.
    """

    absent: Sequence[Absent] = ()
    elsewhere: Collection[str] = ()
    counted_elsewhere: Collection[str] = ()

    def own(self, given: Mapping[str, Any], present: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entries of a given state dict without those of other ranks."""
        if not self.elsewhere:
            return given
        return {k: v for k, v in given.items() if k in present or k not in self.elsewhere}


_TORCH = str(Path(torch.__file__).parent)
# Code that needs the parameters of one rank: modules that clear gradients, optimizers, and autopar.
_OF_ONE_RANK = (f"{_TORCH}/nn/modules", f"{_TORCH}/optim", str(Path(__file__).parents[2]))


def say_of_one_stage(absent: int, *, has_said: bool) -> bool:
    """Warns whoever goes through `parameters()` that they are those of one stage; returns whether that was ever said.

    Args:
        absent: number of parameters of other ranks.
        has_said: whether it was said before, and is not to be said again.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back and frame.f_code.co_name in ("parameters", "named_parameters"):
        frame, depth = frame.f_back, depth + 1
    file = frame.f_code.co_filename
    if has_said or file.startswith(_OF_ONE_RANK):
        return has_said
    warn_together(
        f"model.parameters() gives the parameters of this rank's pipeline stages; {absent} more are on other ranks. "
        "An optimizer needs no others, but a norm, a sum or a penalty over them covers only this stage, and zip() with "
        "the parameters of another model pairs the wrong ones. "
        "model.clip_grad_norm_(math.inf) returns the norm of all gradients.",
        stacklevel=depth,
    )
    return True


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

    Attributes:
        lacks: entries of the model that other ranks have.
    """

    lacks: Collection[str] = ()
    _metadata: dict[str, Any] | None = None  # as nn.Module.state_dict gives it, with the rank

    def shards(self) -> OrderedDict[str, Any]:
        """The same entries in a dict that `torch.save` writes as they are: this rank's shards."""
        found = OrderedDict((name, _torch.for_a_file(x)) for name, x in self.items())
        found._metadata = self._metadata  # type: ignore[attr-defined]
        return found

    def with_entries(self, entries: Mapping[str, Any]) -> RankState:
        """Other entries of this rank."""
        found = RankState(entries)
        found.lacks, found._metadata = self.lacks, self._metadata
        return found

    def copy(self) -> RankState:
        return self.with_entries(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> RankState:
        return self.with_entries(deepcopy(dict(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        shards = [k for k, x in self.items() if isinstance(x, DTensor) and _torch.has_shards(x)]
        if shards or self.lacks:
            raise StepError(_not_whole(shards or list(self.lacks)))
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


def of_rank(state: dict[str, Any], rank: int, lacks: Collection[str]) -> dict[str, Any]:
    """A state dict that knows whose shards it has; `lacks` are the entries that other ranks have."""
    if not hasattr(state, "_metadata"):  # the caller gave a plain dict to fill
        return state
    state._metadata.setdefault("", {})[_RANK] = rank
    found = RankState({name: _torch.as_entry_of_stage(x) for name, x in state.items()} if lacks else state)
    found.lacks, found._metadata = lacks, state._metadata
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


def as_stored(given: Mapping[str, Any], present: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cuts the whole tensors of a state dict by the placements of the present DTensors with the same names."""
    full = [k for k, v in given.items() if isinstance(present.get(k), DTensor)]
    plain = {k: given[k] for k in full if not isinstance(given[k], DTensor)}
    cut = {
        k: _torch.cut_like(v, present[k])
        for k, v in plain.items()
        if isinstance(v, Tensor) and v.shape == present[k].shape
    }
    return {**given, **cut} if cut else given


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


def take_part(model: nn.Module, stages: Sequence[Program], users: Users, world: World, adoption: Adoption) -> RankPart:
    """Drops the parameters that other pipeline ranks hold."""
    pipeline = stages[0].plan.pipeline
    assert world.pipe is not None and pipeline is not None and world.device_mesh is not None
    rank = world.pipe.rank
    before = list(model.state_dict(keep_vars=True))
    absent = _take_out(model, held_by(rank, users, pipeline), adoption, world.device_mesh)
    after = model.state_dict(keep_vars=True)
    return RankPart(
        absent=absent,
        elsewhere=frozenset(n for n in before if n not in after),
        counted_elsewhere=frozenset(name for name, own in users.items() if min(map(pipeline.rank_of, own)) < rank),
    )


def _take_out(model: nn.Module, held: Container[str], adoption: Adoption, device_mesh: DeviceMesh) -> list[Absent]:
    """Takes out of a model, and of the optimizers that follow it, all parameters but those held."""
    absent: list[Absent] = []
    likenesses: dict[int, nn.Parameter] = {}
    leaving = {id(p): p for name, p in model.named_parameters() if name not in held}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in leaving:
                like = likenesses.setdefault(id(parameter), _likeness(parameter))
                absent.append(Absent(module, key, like))
                module._parameters[key] = None
    for parameter in leaving.values():
        _empty(parameter, device_mesh)
        adoption.replace(parameter, None)
    return absent


def _likeness(parameter: nn.Parameter) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def _empty(parameter: nn.Parameter, device_mesh: DeviceMesh) -> None:
    """Frees the values, which an optimizer may hold until its next step."""
    nothing = torch.empty(0, dtype=parameter.dtype)
    placements = (Replicate(),) * device_mesh.ndim
    stored = _torch.dtensor(nothing, device_mesh, placements, (0,))
    parameter.grad = None
    torch.utils.swap_tensors(parameter, nn.Parameter(stored, requires_grad=False))
