"""Flat collectives of tensors that one rank of an axis owns, while the other ranks have no part of them.

`keep` and `fill` send nothing: the other ranks drop their copy, or create zeros.

By rows, only the rows that are not all zero are sent ([Note: by rows]). The numbers of rows are sent when the
collective starts, and the rows themselves when it is waited for, in one message from each sender: the indices of all
tensors, then their rows. All ranks start collectives in one order, and wait for them in one order, so that a message
meets the buffer that was made for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops.collectives import group_name, naming_failures, nothing
from autopar.ops.rows import NonzeroRows, add_rows, rows_of
from autopar.runtime.collectives.flat import Started, apart, flattened, group_of, joined, room, stack, without
from autopar.runtime.collectives.hops import Hop
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


# --- by rows

_COUNT = torch.int64  # of numbers of rows and of indices


class _Works(NamedTuple):
    """Several messages that are waited for as one."""

    works: Sequence[dist.Work | None]

    def wait(self) -> None:
        for work in self.works:
            assert work is not None, "this rank is in the group"
            work.wait()


def _start_rows(
    hops: list[Hop], tensors: list[Tensor], world: World, *, senders: Sequence[int], owner: int, bases: list[Tensor]
) -> Started:
    """Starts messages from some ranks to an owner, which adds what they bring to the tensors in `bases`."""
    group = group_of(hops[0], world)
    rank, like = group.rank(), tensors[0]
    with naming_failures(hops[0].name, group_name(group)):
        if rank == owner:
            counts = [like.new_empty(len(hops), dtype=_COUNT) for _ in senders]
            pairs = zip(counts, senders, strict=True)
            works = [dist.irecv(count, group=group, group_src=source) for count, source in pairs]
            return Started(hops, _Works(works), group, lambda: _received(hops, bases, counts, senders, group))
        if rank not in senders:
            return Started(hops, None, group, lambda: without(hops, like))
        rows = [rows_of(x) for x in tensors]
        count = torch.tensor([len(each.indices) for each in rows], dtype=_COUNT, device=like.device)
        work = dist.isend(count, group=group, group_dst=owner)
        return Started(hops, _Works([work]), group, lambda: _sent(hops, rows, count, like, group, owner))


def _sent(
    hops: list[Hop], rows: list[NonzeroRows], count: Tensor, like: Tensor, group: dist.ProcessGroup, owner: int
) -> list[Tensor]:
    """Sends rows, of which the owner knows the numbers; returns what a rank has of a tensor that it does not own."""
    parts = [each.indices for each in rows] + [each.values for each in rows]
    message = torch.cat([part.view(torch.uint8).reshape(-1) for part in parts])
    if len(message):
        with naming_failures(hops[0].name, group_name(group)):
            dist.send(message, group=group, group_dst=owner)
    return without(hops, like)


def _received(
    hops: list[Hop], bases: list[Tensor], counts: list[Tensor], senders: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Receives the rows of all senders, in their order, and adds them to the tensors in `bases`."""
    for count, source in zip(counts, senders, strict=True):
        numbers = count.tolist()
        widths = [math.prod(base.shape[1:]) for base in bases]
        sizes = [number * width for number, width in zip(numbers, widths, strict=True)]
        first = sum(numbers) * _COUNT.itemsize
        message = bases[0].new_empty(first + sum(sizes) * bases[0].itemsize, dtype=torch.uint8)
        if len(message):
            with naming_failures(hops[0].name, group_name(group)):
                dist.recv(message, group=group, group_src=source)
        indices = message[:first].view(_COUNT).split(numbers)
        values = message[first:].view(bases[0].dtype).split(sizes)
        for base, index, value in zip(bases, indices, values, strict=True):
            add_rows(base, NonzeroRows(index, value.view(-1, *base.shape[1:])))
    return bases


def _start_reduce_rows(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    owner = hops[0].dims[0]
    senders = [rank for rank in range(hops[0].size) if rank != owner]
    return _start_rows(hops, tensors, world, senders=senders, owner=owner, bases=tensors)


def _start_send_rows(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    source, owner = hops[0].dims
    bases = [tensors[0].new_zeros(hop.result) for hop in hops]
    return _start_rows(hops, tensors, world, senders=[source], owner=owner, bases=bases)


OWNERS_STARTS: dict[str, Callable[[list[Hop], list[Tensor], World], Started]] = {
    "broadcast": _start_broadcast,
    "reduce": _start_reduce,
    "scatter": _start_scatter,
    "gather": _start_gather,
    "send": _start_send,
    "keep": _start_keep,
    "fill": _start_fill,
    "reduce_rows": _start_reduce_rows,
    "send_rows": _start_send_rows,
}
