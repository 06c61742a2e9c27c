"""Optimizers of torch update the local shards of DTensors, in place of the DTensors.

An optimizer of torch collects its parameters, gradients and states in lists, and hands them to one function of its
module, such as `torch.optim.adam.adam`. torch dispatches every op of that function on a DTensor in Python, which takes
several times what the op does. The functions named below compute entry by entry, so that they give the same bits on
local shards. From the first `update_by_shards` on they are replaced by functions that take the shards out of the lists
first. Muon needs whole matrices, and has a way of its own (`autopar._torch.muon`). All else remains torch's: hooks,
closures, groups, and states, which it makes as DTensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import dtensor, local_of
from autopar._torch.distributed.elsewhere import of_own, own_parameters
from autopar._torch.distributed.owned import copy_parts_of_buffers, cut_like, follow_assigned_data
from autopar._torch.muon import by_owners
from autopar._torch.parts import unchecked

Owns = Callable[[Tensor], bool]
GroupOf = Callable[[torch.optim.Optimizer], dist.ProcessGroup | None]

# AdamW is Adam with an option. Left out are those that compute norms or products of whole parameters.
_ENTRY_BY_ENTRY = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


def update_by_shards(owns: Owns) -> Callable[[], None]:
    """Makes the optimizers of torch update DTensors by their local shards, if `owns` returns True for the DTensor.

    An assignment to `.data` of such a DTensor gives the shards their parts, see `follow_assigned_data`.

    Returns a function that restores the behaviour of torch.
    """
    _owners().append(owns)
    return lambda: _owners().remove(owns)


@functools.cache
def _owners() -> list[Owns]:
    """The registered `owns` functions; the first call replaces the update functions of torch."""
    follow_assigned_data(_is_owned)
    copy_parts_of_buffers()
    for name in _ENTRY_BY_ENTRY:
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, of_own(_by_shards(getattr(module, name))))
    module = importlib.import_module("torch.optim._muon")
    module.muon = of_own(by_owners(module.muon, _can_be_cut))  # type: ignore[attr-defined]
    return []


def _is_owned(x: Tensor) -> bool:
    return any(owns(x) for owns in tuple(_owners()))


def _by_shards(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_shards(*lists: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not _can_be_cut(lists, options):
            return update(*lists, **options)
        shards = [[None if x is None else local_of(x) for x in each] for each in lists]
        _update(update, shards, options)
        increment_version([p for p in lists[0] if isinstance(p, DTensor)])
        for states, cut in zip(lists, shards, strict=True):
            _fill(states, cut, lists[0])

    return update_shards


def _update(update: Callable[..., None], shards: list[list[Tensor | None]], options: Mapping[str, Any]) -> None:
    """Runs an update on local shards.

    A fused update goes through the memory of a tensor, whatever its strides are (torch 2.13): of a shard that is a part
    of the columns of a buffer it would write into its neighbours. It gets a copy, which is copied back.
    """
    if not options.get("fused"):
        return update(*shards, **options)
    rows = [[x if x is None else x.contiguous() for x in each] for each in shards]
    update(*rows, **options)
    for given, row in zip(shards, rows, strict=True):
        for i, (x, updated) in enumerate(zip(given, row, strict=True)):
            if x is None:
                given[i] = updated
            elif updated is not None and updated is not x:
                x.copy_(updated)


def _can_be_cut(lists: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the update can be computed from the local shards alone."""
    if not lists or not all(isinstance(each, list) for each in lists):
        return False
    if options.get("differentiable") or any(isinstance(x, DTensor) for x in options.values()):
        return False
    cut = [p for p in lists[0] if isinstance(p, DTensor)]
    if not cut or not all(map(_is_owned, cut)):
        return False
    return all(_lies_as(x, p) for each in lists[1:] for x, p in zip(each, lists[0], strict=False))


def _lies_as(x: Tensor | None, parameter: Tensor) -> bool:
    """Whether a gradient or a state is cut as its parameter; a single number, such as a count of steps, need not be."""
    if isinstance(x, DTensor) and isinstance(parameter, DTensor):
        mine, other = x._spec, parameter._spec
        same_mesh = mine.mesh is other.mesh or mine.mesh == other.mesh
        return mine is other or (same_mesh and mine.placements == other.placements)
    if x is None or isinstance(x, DTensor):
        return x is None
    return x.ndim == 0 or not isinstance(parameter, DTensor)


def cut_loaded_states(optimizer: torch.optim.Optimizer, owns: Owns) -> None:
    """Cuts states that are whole tensors as their parameters lie, if `owns` returns True for these.

    They were loaded, or were made with the optimizer, before there was a plan, as those of Adagrad are. That is so of
    all states or of none, so that one parameter shows whether there is anything to cut.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not parameter.ndim or not owns(parameter):
            continue
        whole = [k for k, x in state.items() if _is_whole(x, parameter)]
        if not whole:
            return
        state.update({k: cut_like(local_of(state[k]), parameter) for k in whole})


def _is_whole(x: Any, parameter: Tensor) -> bool:
    if not isinstance(x, Tensor) or x.shape != parameter.shape or _lies_as(x, parameter):
        return False
    return not isinstance(x, DTensor) or all(placement.is_replicate() for placement in x.placements)


def _fill(states: list[Tensor | None], shards: list[Tensor | None], parameters: Sequence[Tensor]) -> None:
    """Puts states that the update has made, such as the first momentum of SGD, into a list as DTensors."""
    for i, made in enumerate(shards):
        if states[i] is None and made is not None:
            states[i] = _alike(made, parameters[i])


def _alike(made: Tensor, parameter: Tensor) -> Tensor:
    """Wraps a tensor as a DTensor with the parameter's placements if the parameter is a DTensor."""
    if not isinstance(parameter, DTensor):
        return made
    shape = tuple(parameter.shape)
    return dtensor(made, parameter.device_mesh, parameter.placements, shape)


def share_overflows(group_of: GroupOf) -> Callable[[], None]:
    """Makes all ranks of a group skip a step of `torch.amp.GradScaler` if a gradient of one of them is not finite.

    A rank of a pipeline stage sees the gradients of its own stage alone.

    Args:
        group_of: function that returns the group of an optimizer's ranks, None where the rank has all gradients. It is
            called before a scaler looks at the gradients.

    Returns a function that restores the behaviour of torch.
    """
    _groups_of().append(group_of)
    return lambda: _groups_of().remove(group_of)


@functools.cache
def _groups_of() -> list[GroupOf]:
    """The registered `group_of` functions; the first call replaces the method by which scalers look at gradients."""
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_and_share(
        self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = [found for of in tuple(_groups_of()) if (found := of(optimizer)) is not None]
        with unchecked(), own_parameters(optimizer):
            own = unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
        for group in groups:
            overflows = torch.stack([found_inf, *(x.to(found_inf.device) for x in own.values())])
            most = overflows.max()
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            own = {most.device: most}
        return own

    GradScaler._unscale_grads_ = unscale_and_share  # type: ignore[method-assign]
    return []
