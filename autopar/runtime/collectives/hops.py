"""Hops: the steps of a conversion of a local tensor from one layout to another.

A `Hop` is a `CollectiveCall` with the local shapes around it, a cast to another element type, or a move to
another tier; the hops from one layout to another are a route, and the transposed hops in reverse order take
the gradient back.

The shapes of a collective are the same on every rank along its axis, so that all put the same tensors into it. A rank
that holds nothing of a tensor, because another rank of an axis owns it, has a tensor with a first dim of 0 in place
of such a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autopar.ir import BY_ROWS, CollectiveCall, Dims, Layout, Mesh, State, Tier, calls_between, part_shape
from autopar.ir.call import FIT
from autopar.ir.tier import moves
from autopar.ops.collectives import result_shape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """One collective on a local tensor, a cast, a fit to another shape, or a move between the device and another tier.

    Attributes:
        name, backward: the op and its transpose; a cast's is the cast back, a fit's the fit back, and a move's the
            move back.
        dims: dims of the viewed tensor, and positions of owners; see `autopar.ir.CollectiveCall`.
        axis: position of the mesh axis, which has at least two ranks; -1 of a cast, a fit or a move.
        size: ranks of the axis.
        before: shape of the local tensor.
        viewed: shape in which the op takes the tensor.
        result: shape of the op's result.
        after: shape in which the result is viewed.
        formats: the two element types of a cast, that of the gradient on its way back and that which the
            tensor takes. A cast to the type that the tensor already has changes only the gradient: that is
            how gradients are reduced in another type than tensors are gathered in.
        tier: the farther memory of a move, or the memory in which a cast runs.
        owners: axis and position of every owner along another axis; only the ranks there run the op.
        is_elsewhere: whether this rank and all its peers along the axis hold nothing of the tensor, because a rank at
            another position of another axis owns it. Nothing is run then.
    """

    name: str
    backward: str
    dims: tuple[int, ...]
    axis: int
    size: int
    before: Shape
    viewed: Shape
    result: Shape
    after: Shape
    formats: tuple[torch.dtype, ...] = ()
    tier: Tier = "device"
    owners: tuple[tuple[int, int], ...] = ()
    is_elsewhere: bool = False

    @classmethod
    def of(cls, call: CollectiveCall, shape: Shape, mesh: Mesh) -> Hop:
        """A collective of a local tensor that has this shape."""
        size = mesh.sizes[call.axis]
        viewed = call.before or shape
        result = tuple(result_shape(call.name, viewed, call.dims, size))
        after = call.after or result
        return cls(call.name, call.backward, call.dims, call.axis, size, shape, viewed, result, after)

    @cached_property
    def transpose(self) -> Hop:
        """The hop that takes the gradient back."""
        return replace(
            self,
            name=self.backward,
            backward=self.name,
            dims=self.dims[::-1],
            before=self.after,
            viewed=self.result,
            result=self.viewed,
            after=self.before,
            formats=self.formats[::-1],
        )


Route = tuple[Hop, ...]


def route(dims: Dims, source: Layout, target: Layout, mesh: Mesh, *, rank: int, back_by_rows: bool = False) -> Route:
    """The hops of a rank from one layout of a tensor to another; axes of one rank need none.

    All ranks have the same hops, but for `is_elsewhere`. With `back_by_rows` the transposed hops carry the gradient by
    rows, see [Note: by rows] in autopar/ir/conversion.py.
    """
    hops: list[Hop] = []
    shape = part_shape(dims, source, mesh, rank)
    for before, each, _ in calls_between(dims, source, target, mesh):
        call = each.on(rank)
        if call.name == FIT:
            hops.append(fit(shape, call.before or shape, call.fits, call.after or call.fits))
            shape = hops[-1].after
            continue
        owners = _owners_beside(before, call.axis)
        position = mesh.coordinates(rank)
        is_elsewhere = any(position[other] != owner for other, owner in owners)
        hop = Hop.of(call.back_by_rows if back_by_rows else call, shape, mesh)
        hops.append(replace(hop, owners=owners, is_elsewhere=is_elsewhere))
        shape = hop.after
    return tuple(hops)


def _owners_beside(layout: Sequence[State], axis: int) -> tuple[tuple[int, int], ...]:
    """Axis and owner of every state O along another axis than the one that is given."""
    return tuple((other, state.owner) for other, state in enumerate(layout) if state.kind == "O" and other != axis)


def cast(shape: Shape, before: torch.dtype, after: torch.dtype, tier: Tier = "device") -> Hop:
    """The hop that casts a tensor of this shape to `after`, and its gradient to `before`."""
    return Hop("cast", "cast", (), -1, 1, shape, shape, shape, shape, (before, after), tier)


def fit(before: Shape, viewed: Shape, result: Shape, after: Shape) -> Hop:
    """The hop that pads or cuts a tensor to another shape, and its gradient back.

    See [Note: uneven parts] in autopar/ir/uneven.py.
    """
    return Hop(FIT, FIT, (), -1, 1, before, viewed, result, after)


def moving(shape: Shape, source: Tier, target: Tier) -> Route:
    """The hops that bring a tensor of this shape from a tier to another, and its gradient back."""
    return tuple(
        Hop(each.name, each.backward, (), -1, 1, shape, shape, shape, shape, tier=each.tier)
        for each in moves(source, target)
    )


def transposed(hops: Route) -> Route:
    """The route of the gradient."""
    return tuple(hop.transpose for hop in reversed(hops))


def signature(hops: Route) -> tuple[tuple[str, int], ...]:
    """The properties that two routes must share to be run together; `vary` moves nothing and does not count.

    Tensors of several owners travel apart: the owner's position is part of the name, and so are owners along other
    axes, beside which ranks have nothing to send.
    """
    return tuple((_kind(hop), hop.axis) for hop in hops if hop.name != "vary")


_TO_OR_FROM_ONE = ("broadcast", "reduce", "keep", "fill", "send", *BY_ROWS.values())


def _kind(hop: Hop) -> str:
    """The name of a hop's op with the owners in it: `broadcast 1`, `send 0 1`, `all_gather 0:1` (rank 1 of axis 0)."""
    owners = hop.dims if hop.name in _TO_OR_FROM_ONE else ()
    owners = hop.dims[:1] if hop.name == "scatter" else owners
    owners = hop.dims[1:] if hop.name == "gather" else owners
    beside = (f"{axis}:{owner}" for axis, owner in hop.owners)
    return " ".join([hop.name, *map(str, owners), *beside])
