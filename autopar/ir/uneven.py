"""Parts of different sizes: a parameter at rest along an axis that does not divide a dim of it.

[Note: uneven parts] S(d.*) along one axis cuts dim d into the parts of `torch.chunk`, which is DTensor's convention: 5
rows over 4 ranks are 2, 2, 1, 0. A collective takes tensors of one shape. So a `fit` pads each part to the largest,
with zeros at the end of the dim, and another cuts what was gathered to the size of the dim: four times 2 rows are
gathered to 8 and cut to 5. Only the last parts are short, so that all that was added lies at the end. Backward the
gradient of 5 rows is padded to 8, reduced and scattered in parts of 2, and cut to those of the ranks. Bytes are priced
as they are sent and held, with what is added. Ops take no such parts: a parameter is gathered for its use.
"""

from __future__ import annotations

import math

from autopar.ir.layout import WHOLE, Dims, Layout, R, divides, has_owner, local_shape
from autopar.ir.mesh import Mesh


def uneven_axes(dims: Dims, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Positions of the axes in S(d.*) that do not divide dim d, so that ranks hold parts of different sizes.

    >>> from autopar.ir import Mesh, S
    >>> uneven_axes(((8,), (6,)), (S(0, WHOLE), S(1, WHOLE)), Mesh.parse("a=3,b=2"))
    (0,)
    """
    return tuple(
        axis
        for axis, state in enumerate(layout)
        if state.factor == WHOLE and math.prod(dims[state.dim]) % mesh.sizes[axis]
    )


def is_storable(dims: Dims, layout: Layout, mesh: Mesh) -> bool:
    """Whether a parameter at rest can have this layout.

    Every axis divides what it splits, except that one axis alone may cut a dim of more than one entry into chunks of
    different sizes. A tensor with such a dim has no owner along another axis.

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
        len({*cut}) == len(cut)
        and touched.isdisjoint(cut)
        and all(math.prod(dims[dim]) > 1 for dim in cut)
        and not has_owner(layout)
        and divides(dims, others, mesh)
    )


def part_shape(dims: Dims, layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Shape of the part that one rank holds: shorter than the largest, or empty, at the end of a dim that is cut so.

    >>> from autopar.ir import Mesh, S
    >>> [part_shape(((5,),), (S(0, WHOLE),), Mesh.parse("dp=4"), rank) for rank in range(4)]
    [(2,), (2,), (1,), (0,)]
    """
    shape = [*local_shape(dims, layout, mesh)]
    position = mesh.coordinates(rank)
    for axis in uneven_axes(dims, layout, mesh):
        dim = layout[axis].dim
        rest = math.prod(dims[dim]) - position[axis] * shape[dim]
        shape[dim] = min(shape[dim], max(rest, 0))
    return tuple(shape)
