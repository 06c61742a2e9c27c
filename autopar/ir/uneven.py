"""Parts of different sizes, where an axis does not divide what it splits.

[Note: uneven parts] Parts are those of `torch.chunk`, which is DTensor's convention: 32 rows over 3 ranks are 11, 11
and 10, and 5 over 4 are 2, 2, 1, 0. Of several axes each cuts the part that the more major ones leave. A collective
takes tensors of one shape. So a `fit` pads each part to the largest of the collective, with zeros at the end of the
factor, and another cuts what came out: of 5 rows four times 2 are gathered to 8 and cut to 5. Only the last parts are
short, so that all that was added lies at the end. Backward the gradient of 5 rows is padded to 8, reduced and scattered
in parts of 2, and cut to those of the ranks. Bytes are priced as they are sent and held, with what is added.

Ops split any factor so, where their rule is right for it (`Choice.needs_equal`) and every rank has a part: no part of
the batch alone (`Graph.batch`) may be empty. Parameters at rest lie so where the parts are those of torch.chunk over
the whole dim: in S(d.*), and in S(d) of a dim of one factor, in which ops use them as they lie.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from autopar.ir.layout import (
    WHOLE,
    Dims,
    Layout,
    R,
    S,
    State,
    divides,
    has_owner,
    local_factors,
    local_shape,
    split_count,
)
from autopar.ir.mesh import Mesh
from autopar.ir.share import on

Factors = tuple[tuple[str, ...], ...]  # names of the factors of every dim


def uneven_axes(dims: Dims, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Positions of the axes along which ranks hold parts of different sizes.

    >>> from autopar.ir import Mesh, S
    >>> uneven_axes(((8,), (6,)), (S(0, WHOLE), S(1)), Mesh.parse("a=3,b=2"))
    (0,)
    """
    return tuple(
        axis
        for axis, state in enumerate(layout)
        if state.kind == "S" and _size(dims, state) % split_count(layout, mesh, state.dim, state.factor)
    )


def _size(dims: Dims, state: State) -> int:
    """Size of what a state splits; 0 for a dim without factors."""
    sizes = dims[state.dim]
    return math.prod(sizes) if state.factor == WHOLE else (sizes or (0,))[state.factor]


def reaches_all(size: int, count: int) -> bool:
    """Whether each of so many ranks has a part of a size.

    >>> reaches_all(5, 3), reaches_all(5, 4)
    (True, False)
    """
    return -(-size // count) * (count - 1) < size


def can_split(dims: Dims, factors: Factors, layout: Layout, mesh: Mesh, batch: Collection[str]) -> bool:
    """Whether ops may take a tensor in a layout: where its axes do not divide a factor, every rank has a part of it.

    Ranks may have no part of the batch alone. Parts of S(d.*) have one size.

    Args:
        dims: for every dim the sizes of its factors.
        factors: their names.
        layout: state of the tensor along every axis.
        mesh: the mesh that it lies on.
        batch: names of the factors that are the batch.
    """
    if divides(dims, layout, mesh):
        return True
    if any(state.splits_as(S(state.dim, WHOLE)) for state in layout):
        return False
    local = local_factors(dims, layout, mesh)
    cut = (layout[axis][1:3] for axis in uneven_axes(dims, layout, mesh))
    return all(
        (factors[dim][i] in batch and dims[dim][i] > 1) or all(on(local[dim], rank)[i] for rank in range(mesh.size))
        for dim, i in cut
    )


def cuts_chunks(dims: Dims, state: State) -> bool:
    """Whether the parts of a split dim are those of torch.chunk, as in DTensor, also where they differ in size."""
    return state.factor == WHOLE or len(dims[state.dim]) == 1


def is_storable(dims: Dims, layout: Layout, mesh: Mesh) -> bool:
    """Whether a parameter at rest can have this layout.

    Every axis divides what it splits, except that one axis alone may cut a dim of more than one entry, of one factor
    or in S(d.*), into chunks of different sizes. A tensor with such a dim has no owner along another axis.

    >>> from autopar.ir import Mesh, S
    >>> is_storable(((5,), (6,)), (S(0, WHOLE), S(1)), Mesh.parse("a=4,b=2"))
    True
    """
    uneven = uneven_axes(dims, layout, mesh)
    if not uneven:
        return divides(dims, layout, mesh)
    others = tuple(R if axis in uneven else state for axis, state in enumerate(layout))
    cut = [layout[axis].dim for axis in uneven]
    touched = {state.dim for state in others if state.kind == "S"}
    return (
        all(cuts_chunks(dims, layout[axis]) for axis in uneven)
        and len({*cut}) == len(cut)
        and touched.isdisjoint(cut)
        and all(math.prod(dims[dim]) > 1 for dim in cut)
        and not has_owner(layout)
        and divides(dims, others, mesh)
    )


def part_shape(dims: Dims, layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Shape of the part that one rank holds; the last ranks along an uneven axis have a smaller part, or an empty one.

    >>> from autopar.ir import Mesh, S
    >>> [part_shape(((5,),), (S(0, WHOLE),), Mesh.parse("dp=4"), rank) for rank in range(4)]
    [(2,), (2,), (1,), (0,)]
    """
    return on(local_shape(dims, layout, mesh), rank)
