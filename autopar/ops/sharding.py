"""The part of a tensor that one rank holds."""

from __future__ import annotations

from torch import Tensor

from autopar.ir import WHOLE, Dims, Layout, Mesh, R, in_nesting_order, local_factors, part_shape
from autopar.ir.share import on
from autopar.ops.collectives import nothing


def shard(full: Tensor, dims: Dims, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """The part of a full tensor of shape `shape_of(dims)` that `rank` holds; R, V and the owner hold all of it.

    A rank that is not the owner holds a tensor with a first dim of 0.
    """
    position = mesh.coordinates(rank)
    owners = [(axis, state.owner) for axis, state in enumerate(layout) if state.kind == "O"]
    before = [state if state.kind != "S" else R for state in layout]
    for axis in in_nesting_order(layout):
        state, size = layout[axis], mesh.sizes[axis]
        if state.kind != "S" or size == 1:
            continue
        factors = [on(f or (1,), rank) for f in local_factors(dims, tuple(before), mesh)]
        index = sum(len(f) for f in factors[: state.dim]) + max(state.factor, 0)
        shape = [n for f in factors for n in f]
        if state.factor == WHOLE:
            shape, index = list(full.shape), state.dim
        expanded = full.reshape(shape)
        whole = expanded.shape[index]
        width = -(-whole // size)
        start = min(position[axis] * width, whole)
        part = expanded.narrow(index, start, min(width, whole - start))
        before[axis] = state
        full = part.reshape(part_shape(dims, tuple(before), mesh, rank))
    return full if all(position[axis] == owner for axis, owner in owners) else nothing(full)
