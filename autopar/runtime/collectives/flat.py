"""Flat collectives: one collective for several tensors, which are copied into one flat buffer.

A function `start_*` starts the collective and returns at once; `Started.wait` waits for it and gives the results. Each
tensor comes with its `Hop`, the conversion step that it takes; all hops of a collective are of one kind along one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.ops.collectives import group_name, naming_failures
from autopar.runtime.collectives.hops import Hop
from autopar.runtime.ranks.world import World


@dataclass
class Started:
    """A collective that was started.

    Attributes:
        hops: the hop of each tensor.
        work: handle of torch.distributed to wait for; None if the collective has ended.
        group: process group of the collective.
        unpack: function that gives the result of each tensor once the collective has ended.
    """

    hops: list[Hop]
    work: Any
    group: dist.ProcessGroup
    unpack: Callable[[], list[Tensor]]

    def wait(self) -> list[Tensor]:
        with naming_failures(self.hops[0].name, group_name(self.group)):
            if self.work is not None:
                self.work.wait()
        return self.unpack()


def group_of(hop: Hop, world: World) -> dist.ProcessGroup:
    group = world.groups[hop.axis]
    assert group is not None, hop
    return group


def without(hops: Sequence[Hop], like: Tensor) -> list[Tensor]:
    """Empty results, for a rank that is not the owner."""
    return [like.new_empty((0, *hop.result[1:])) for hop in hops]


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors in one buffer; of a single one in its own memory, where it has them in a row."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).contiguous()
    return torch.cat([x.reshape(-1) for x in tensors])


def room(hops: Sequence[Hop], like: Tensor) -> Tensor:
    """A flat buffer for the results of all hops."""
    return like.new_empty(sum(torch.Size(hop.result).numel() for hop in hops))


def apart(flat: Tensor, hops: Sequence[Hop]) -> list[Tensor]:
    """The results of all hops in a flat buffer."""
    parts = flat.split([torch.Size(hop.result).numel() for hop in hops])
    return [part.view(hop.result) for part, hop in zip(parts, hops, strict=True)]


def start_all_reduce(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, flat = group_of(hops[0], world), flattened(tensors)
    with naming_failures("all_reduce", group_name(group)):
        work = _torch.start_all_reduce(flat, group)
    return Started(hops, work, group, lambda: apart(flat, hops))


def start_all_gather(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, flat = group_of(hops[0], world), flattened(tensors)
    rows = flat.new_empty(hops[0].size, flat.numel())
    with naming_failures("all_gather", group_name(group)):
        work = _torch.start_all_gather(rows.view(-1), flat, group)
    return Started(hops, work, group, lambda: joined(rows, hops))


def joined(rows: Tensor, hops: Sequence[Hop]) -> list[Tensor]:
    """The gathered tensors, each its shards concatenated along its hop's dim.

    Args:
        rows: flat shards of all tensors, one row for each rank.
        hops: hop of each tensor, an all-gather or a gather to its owner.
    """
    found = []
    for part, hop in zip(rows.split([torch.Size(hop.viewed).numel() for hop in hops], dim=1), hops, strict=True):
        shards = part.unflatten(1, hop.viewed) if hop.viewed else part.view(hop.size)
        found.append(shards.movedim(0, hop.dims[0]).reshape(hop.result).contiguous())
    return found


def start_reduce_scatter(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, stacked = group_of(hops[0], world), stack(hops, tensors)
    tensors.clear()
    reduced = room(hops, stacked)
    with naming_failures("reduce_scatter", group_name(group)):
        work = _torch.start_reduce_scatter(reduced, stacked.view(-1), group)
    return Started(hops, work, group, lambda: apart(reduced, hops))


def stack(hops: list[Hop], tensors: list[Tensor]) -> Tensor:
    """The flat input of a reduce-scatter, all-to-all or scatter: row i has the parts of all tensors that rank i gets.

    Args:
        hops: hop of each tensor.
        tensors: local tensors, which are cut along the last dim of their hop's `dims`.
    """
    size = hops[0].size
    cut = [x.unflatten(h.dims[-1], (size, -1)).movedim(h.dims[-1], 0) for x, h in zip(tensors, hops, strict=True)]
    if len(cut) == 1:
        return cut[0].contiguous().view(size, -1)
    sizes = [part[0].numel() for part in cut]
    stacked = tensors[0].new_empty(size, sum(sizes))
    for rows, part in zip(stacked.split(sizes, dim=1), cut, strict=True):
        rows.unflatten(1, part.shape[1:]).copy_(part)
    return stacked


def start_all_to_all(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    group, size = group_of(hops[0], world), hops[0].size
    sizes = [torch.Size(hop.viewed).numel() // size for hop in hops]
    stacked = stack(hops, tensors)
    tensors.clear()
    exchanged = torch.empty_like(stacked)

    def unpack() -> list[Tensor]:
        parts = exchanged.split(sizes, dim=1)
        return [_exchanged(part, hop) for part, hop in zip(parts, hops, strict=True)]

    with naming_failures("all_to_all", group_name(group)):
        work = _torch.start_all_to_all(exchanged.view(-1), stacked.view(-1), group)
    return Started(hops, work, group, unpack)


def _exchanged(rows: Tensor, hop: Hop) -> Tensor:
    """The result of one hop of an all-to-all: the parts that ranks have sent, concatenated along the gathered dim."""
    gathered, cut = hop.dims
    shape = list(hop.viewed)
    shape[cut] //= hop.size
    parts = rows.unflatten(1, shape).movedim(0, gathered)
    return parts.reshape(hop.result).contiguous()


STARTS: dict[str, Callable[[list[Hop], list[Tensor], World], Started]] = {
    "all_reduce": start_all_reduce,
    "all_gather": start_all_gather,
    "all_to_all": start_all_to_all,
    "reduce_scatter": start_reduce_scatter,
}
