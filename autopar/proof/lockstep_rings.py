"""Ring attention on all ranks of one process: their dialogues in lockstep, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autopar.ir import Mesh
from autopar.ops.ring import Ring
from autopar.ops.ring_attention import Operands, attend, attend_backward
from autopar.ops.ring_place import Dialogue, RingPlace, Send, Tensors

T = TypeVar("T")


def attend_together(ring: Ring, mesh: Mesh, values: Mapping[fx.Node, list[Any]]) -> list[tuple[Tensor, ...]]:
    """The results and log-sum-exps of all ranks, given the values of every node on each of them."""
    given = [values[node] for node in ring.tensors if node is not None]
    flat = _Together.apply(ring, mesh, len(given), *(x for ranks in given for x in ranks))
    return [tuple(flat[2 * rank : 2 * rank + 2]) for rank in range(mesh.size)]


class _Together(torch.autograd.Function):
    """Ring attention on all ranks; its tensors are query, key, value and perhaps a mask, each of all ranks."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, mesh: Mesh, count: int, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.ring, ctx.mesh, ctx.count = ring, mesh, count
        found = _dialogues(ring, mesh, [attend(place, ring.how, own) for place, own in _ranks(ctx, flat)])
        results = tuple(x for both in found for x in both)
        ctx.mark_non_differentiable(*results[1::2])
        ctx.save_for_backward(*flat, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.saved_tensors[: ctx.count * ctx.mesh.size]
        results = ctx.saved_tensors[len(flat) :]
        dialogues = [
            attend_backward(place, ctx.ring.how, own, (results[2 * i], results[2 * i + 1]), gradients[2 * i])
            for i, (place, own) in enumerate(_ranks(ctx, flat))
        ]
        found = _dialogues(ctx.ring, ctx.mesh, dialogues)
        masks = [None] * (len(flat) - 3 * ctx.mesh.size)
        return None, None, None, *(of_rank[i] for i in range(3) for of_rank in found), *masks


def _ranks(ctx: Any, flat: Sequence[Tensor]) -> list[tuple[RingPlace, Operands]]:
    """The place of every rank, with its operands."""
    mesh: Mesh = ctx.mesh
    found = []
    for rank in range(mesh.size):
        place = ctx.ring.place([mesh.coordinates(rank)[mesh.index(x)] for x in ctx.ring.groups])
        query, key, value, *masks = (flat[i * mesh.size + rank] for i in range(ctx.count))
        found.append((place, Operands(query, key, value, masks[0] if masks else None)))
    return found


def _dialogues(ring: Ring, mesh: Mesh, dialogues: Sequence[Dialogue[T]]) -> list[T]:
    """The results of the dialogues of all ranks, which all send at once and as often."""
    sends: list[Send | None] = [next(each, None) for each in dialogues]
    results: dict[int, T] = {}
    while len(results) < len(dialogues):
        arrivals = [_arriving(ring, mesh, rank, sends) for rank in range(mesh.size)]
        for rank, (dialogue, arrived) in enumerate(zip(dialogues, arrivals, strict=True)):
            try:
                sends[rank] = dialogue.send(lambda arrived=arrived: arrived)  # type: ignore[misc]
            except StopIteration as end:
                results[rank] = end.value
    return [results[rank] for rank in range(mesh.size)]


def _arriving(ring: Ring, mesh: Mesh, rank: int, sends: Sequence[Send | None]) -> Tensors:
    """The tensors that a rank receives: its part of those that every rank along the axis sends."""
    own = sends[rank]
    assert own is not None, "a ring has at least two ranks"
    axis = mesh.index(ring.groups[own.axis])
    found = []
    for peer, expected in zip(mesh.peers(rank, axis), own.coming, strict=True):
        send = sends[peer]
        assert send is not None and send.axis == own.axis, "all ranks send at once"
        part = send.parts[mesh.coordinates(rank)[axis]]
        assert tuple((tuple(x.shape), x.dtype) for x in part) == expected, (part, expected)
        found += [x.clone() for x in part]
    return tuple(found)
