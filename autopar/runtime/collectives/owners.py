"""Flat collectives of tensors that one rank of an axis owns, while the other ranks have no part of them.

`keep` and `fill` send nothing: the other ranks drop their copy, or create zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from autopar.ops.collectives import group_name, naming_failures, nothing
from autopar.runtime.collectives.flat import Started, apart, flattened, group_of, joined, room, stack, without
from autopar.runtime.collectives.hops import Hop
from autopar.runtime.collectives.rows import ROWS_STARTS
from autopar.runtime.ranks.world import World


def _start_broadcast(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, owner = group_of(hops[0], world), hops[0].dims[0]
    is_owner = group.rank() == owner
    flat = flattened(tensors) if is_owner else room(hops, tensors[0])
    with naming_failures("broadcast", group_name(group)):
        work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
    # the owner goes on with its own copy: the buffer is free when it has been sent
    return Started(hops, work, group, lambda: tensors if is_owner else apart(flat, hops))


def _start_reduce(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, owner = group_of(hops[0], world), hops[0].dims[0]
    flat, is_owner = flattened(tensors), group.rank() == owner
    with naming_failures("reduce", group_name(group)):
        work = dist.reduce(flat, group=group, group_dst=owner, async_op=True)
    return Started(hops, work, group, lambda: apart(flat, hops) if is_owner else without(hops, flat))


def _start_scatter(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, owner = group_of(hops[0], world), hops[0].dims[0]
    part = room(hops, tensors[0])
    parts = list(stack(hops, tensors).unbind(0)) if group.rank() == owner else None
    with naming_failures("scatter", group_name(group)):
        work = dist.scatter(part, parts, group=group, group_src=owner, async_op=True)
    return Started(hops, work, group, lambda: apart(part, hops))


def _start_gather(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, owner, flat = group_of(hops[0], world), hops[0].dims[1], flattened(tensors)
    is_owner = group.rank() == owner
    rows = flat.new_empty(hops[0].size, flat.numel()) if is_owner else flat.new_empty(0)
    with naming_failures("gather", group_name(group)):
        parts = list(rows.unbind(0)) if is_owner else None
        work = dist.gather(flat, parts, group=group, group_dst=owner, async_op=True)
    return Started(hops, work, group, lambda: joined(rows, hops) if is_owner else without(hops, flat))


def _start_send(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, (source, target) = group_of(hops[0], world), hops[0].dims
    rank, work = group.rank(), None
    flat = room(hops, tensors[0]) if rank == target else flattened(tensors)
    with naming_failures("send", group_name(group)):
        if rank == source:
            work = dist.isend(flat, group=group, group_dst=target)
        elif rank == target:
            work = dist.irecv(flat, group=group, group_src=source)
    return Started(hops, work, group, lambda: apart(flat, hops) if rank == target else without(hops, flat))


def _start_keep(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group = group_of(hops[0], world)
    kept = tensors if group.rank() == hops[0].dims[0] else [nothing(x) for x in tensors]
    return Started(hops, None, group, lambda: kept)


def _start_fill(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group = group_of(hops[0], world)
    is_owner = group.rank() == hops[0].dims[0]
    filled = tensors if is_owner else [tensors[0].new_zeros(hop.result) for hop in hops]
    return Started(hops, None, group, lambda: filled)


OWNERS_STARTS: dict[str, Callable[[list[Hop], list[Tensor], World], Started]] = {
    "broadcast": _start_broadcast,
    "reduce": _start_reduce,
    "scatter": _start_scatter,
    "gather": _start_gather,
    "send": _start_send,
    "keep": _start_keep,
    "fill": _start_fill,
    **ROWS_STARTS,
}
