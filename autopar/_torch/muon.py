"""torch.optim.Muon on DTensors: every matrix is orthogonalized by one rank, its owner, and not by all.

Muon takes the momentum of a matrix to the nearest orthogonal one by five steps of Newton and Schulz, which need the
whole matrix (Jordan et al. 2024). On DTensors torch gathers it on every rank, and computes on parts whose bfloat16
sums round otherwise than one device's. Here, along the first axis that splits a matrix (that of ZeRO, if there is one):

    every rank    momentum and direction of its shards, entry by entry
    all-to-all    shards of the directions, in bfloat16, to the owners
    owner         orthogonalizes its matrices as one device does
    all-to-all    parts of the results, in bfloat16, to the ranks that store them
    every rank    updates its shards

Newton and Schulz compute in bfloat16 on one device too, so that both messages lose nothing. Owners are dealt by work:
the largest matrix goes to the rank that has least so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar._torch.distributed.dtensors import dtensor, local_of
from autopar._torch.distributed.groups import exchange_rows
from autopar._torch.parts import unchecked

Update = Callable[..., None]
Orthogonalize = Callable[[Tensor], Tensor]


def by_owners(update: Update, can_be_cut: Callable[[Sequence[Any], Mapping[str, Any]], bool]) -> Update:
    """A function for `torch.optim._muon.muon` that updates DTensors as this module says, and all else as before.

    Args:
        update: the function of torch.
        can_be_cut: whether the update of such lists can be computed from local shards.
    """
    from torch.optim import _muon
    from torch.optim.optimizer import _to_scalar

    @functools.wraps(update)
    def update_shards(*lists: Any, **options: Any) -> None:
        is_plain = torch.compiler.is_compiling() or options["has_complex"] or options.get("foreach")
        if is_plain or not can_be_cut(lists, options) or any(g.ndim != 2 for g in lists[1]):
            return update(*lists, **options)
        params, grads, momenta = lists
        lr, momentum = _to_scalar(options["lr"]), options["momentum"]
        directions = []
        for gradient, buffer in zip(map(local_of, grads), map(local_of, momenta), strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            direction = gradient.lerp(buffer, momentum) if options["nesterov"] else buffer
            # A copy, since orthogonalizing changes what is in bfloat16 already.
            directions.append(direction.to(torch.bfloat16, copy=True))
        how = options["ns_coefficients"], options["ns_steps"], options["eps"]
        found = _orthogonal(params, directions, lambda x: _muon._zeropower_via_newtonschulz(x, *how))
        for parameter, step in zip(params, found, strict=True):
            shard = local_of(parameter)
            shard.mul_(1 - lr * options["weight_decay"])
            shard.add_(step, alpha=-_muon._adjust_lr(lr, options["adjust_lr_fn"], parameter.shape))
        increment_version([p for p in params if isinstance(p, DTensor)])

    return update_shards


class _Member(NamedTuple):
    """A matrix that one axis splits: its position among the parameters, its shape, a rank's part, and the split dim."""

    number: int
    shape: torch.Size
    shard: Tensor
    dim: int


def _orthogonal(params: Sequence[Tensor], directions: Sequence[Tensor], orthogonalize: Orthogonalize) -> list[Tensor]:
    """The orthogonalized shards of all parameters, in their order."""
    found: dict[int, Tensor] = {}
    lines: dict[tuple[DeviceMesh, int], list[_Member]] = {}
    for number, (parameter, shard) in enumerate(zip(params, directions, strict=True)):
        axis = _axis(parameter)
        if axis is None or not isinstance(parameter, DTensor):
            found[number] = _by_every_rank(parameter, shard, orthogonalize)
            continue
        part = _over(parameter, shard).redistribute(placements=_alone(parameter, axis))
        dim = _dim(parameter, axis)
        member = _Member(number, parameter.shape, part._local_tensor, dim)
        lines.setdefault((parameter.device_mesh, axis), []).append(member)
    for (mesh, axis), members in lines.items():
        results = _by_owners(mesh, axis, members, orthogonalize)
        for member, result in zip(members, results, strict=True):
            found[member.number] = _as_stored(params[member.number], axis, result)
    return [found[number] for number in range(len(params))]


def _axis(parameter: Tensor) -> int | None:
    """The first axis that splits a matrix, if it does so in equal parts, and every axis by runs of rows or columns."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    split = [a for a, p in enumerate(parameter.placements) if not p.is_replicate() and mesh.size(a) > 1]
    if not split or any(type(parameter.placements[a]) is not Shard for a in split):
        return None
    axis = split[0]
    return None if parameter.shape[_dim(parameter, axis)] % mesh.size(axis) else axis


def _dim(parameter: DTensor, axis: int) -> int:
    placement = parameter.placements[axis]
    assert isinstance(placement, Shard)
    return placement.dim


def _alone(parameter: DTensor, axis: int) -> list[Placement]:
    """The placements of a parameter that one axis alone splits."""
    return [p if a == axis else Replicate() for a, p in enumerate(parameter.placements)]


def _over(parameter: DTensor, shard: Tensor) -> DTensor:
    return dtensor(shard, parameter.device_mesh, parameter.placements, tuple(parameter.shape))


def _by_every_rank(parameter: Tensor, shard: Tensor, orthogonalize: Orthogonalize) -> Tensor:
    """The shard of a matrix that has no owner: it is whole on every rank, or gathered there."""
    if not isinstance(parameter, DTensor):
        return orthogonalize(shard)
    mesh = parameter.device_mesh
    with unchecked():
        whole = orthogonalize(_over(parameter, shard).full_tensor().contiguous())
    everywhere = dtensor(whole, mesh, [Replicate()] * mesh.ndim, tuple(parameter.shape))
    return everywhere.redistribute(placements=parameter.placements)._local_tensor


def _as_stored(parameter: Tensor, axis: int, result: Tensor) -> Tensor:
    """The part that a rank stores of what one axis alone splits."""
    assert isinstance(parameter, DTensor)
    split = dtensor(result, parameter.device_mesh, _alone(parameter, axis), tuple(parameter.shape))
    return split.redistribute(placements=parameter.placements)._local_tensor


def _by_owners(mesh: DeviceMesh, axis: int, members: Sequence[_Member], orthogonalize: Orthogonalize) -> list[Tensor]:
    """This rank's parts of the orthogonalized matrices that an axis splits."""
    ranks, me = mesh.size(axis), mesh.get_local_rank(axis)
    exchange = functools.partial(exchange_rows, group=mesh.get_group(axis).group_name)
    owners = deal([work(*member.shape) for member in members], ranks)
    of = [[m for m, owner in zip(members, owners, strict=True) if owner == r] for r in range(ranks)]
    sent = [sum(m.shard.numel() for m in each) for each in of]
    received = [sent[me]] * ranks
    arrived = exchange(_flat(m.shard for each in of for m in each), sent, received)
    parts = zip(*(_cut(part, of[me]) for part in arrived.split(received)), strict=True)
    wholes = [
        orthogonalize(torch.cat(each, member.dim)).chunk(ranks, member.dim)
        for each, member in zip(parts, of[me], strict=True)
    ]
    back = _flat(whole[rank] for rank in range(ranks) for whole in wholes)
    # A rank that owns none still has a tensor to send.
    returned = exchange(back if wholes else arrived, received, sent)
    ordered = [m for each in of for m in each]
    found = zip(ordered, _cut(returned, ordered), strict=True)
    return [part for _, part in sorted(found, key=lambda pair: pair[0].number)]


def work(rows: int, columns: int) -> int:
    """FLOPs of a step of Newton and Schulz on a matrix: three products, of which one is of squares."""
    short, long = sorted((rows, columns))
    return 2 * short * short * (2 * long + short)


def deal(works: Sequence[int], ranks: int) -> list[int]:
    """The owner of every matrix: the largest first, each to the rank with the least work so far.

    >>> deal([4, 1, 3, 2], 2)
    [0, 0, 1, 1]
    """
    loads, owners = [0] * ranks, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    parts = [x.reshape(-1) for x in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def _cut(flat: Tensor, members: Sequence[_Member]) -> list[Tensor]:
    """The parts of matrices that lie one behind the other."""
    parts = flat.split([member.shard.numel() for member in members])
    return [part.view(m.shard.shape) for part, m in zip(parts, members, strict=True)]
