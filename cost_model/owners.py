"""Costs of parameters that one rank of an axis owns (state `O(i)`), and the ranks of plans in which it runs ops.

During a step every rank holds the resident copy, and its gradient until it is reduced. Only the owner keeps the stored
parameter and the optimizer's states, and updates them. The memory and the optimizer's time of a plan are those of the
rank that owns most bytes. Where the search has not chosen the owner yet (`O(*)`), every rank counts an equal share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.cost_model.arith import Quantity
from autopar.cost_model.sizes import Sizes
from autopar.ir import ANY, OWNED, Graph, Layout, Mesh, ParameterPlan, Plan, has_owner, local_elements, runs_alone

Position = Sequence[int]


def busiest_owner(graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh) -> Position:
    """The mesh coordinates of the rank that owns most bytes; the first such rank if several own as much.

    The coordinate is 0 along an axis without owned parameters.
    """
    owned = {name: how.storage for name, how in parameters.items() if has_owner(how.storage)}
    axes = [
        range(size if any(storage[axis].kind == "O" for storage in owned.values()) else 1)
        for axis, size in enumerate(mesh.sizes)
    ]

    def owned_bytes(position: Position) -> float:
        found = 0.0
        for name, storage in owned.items():
            tensor = graph.tensors[graph.parameters[name]].at_rest
            size = local_elements(tensor.dims, storage, mesh) * tensor.itemsize_bytes
            count = graph.layer_count.get(name, 1)
            found += count * size * owned_share(storage, position, Sizes(mesh))
        return found

    return max(itertools.product(*axes), key=owned_bytes)


def has_lone_ops(plan: Plan) -> bool:
    """Whether one rank of some axis runs an op of the plan alone."""
    return any(map(runs_alone, plan.ops.values()))


def owners_of_ops(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of the ranks that differ in work or memory; 0 along axes without owners."""
    owned = [how.storage for how in plan.parameters.values()]
    axes = [
        any(labels[axis].startswith(OWNED) for labels in plan.ops.values())
        or any(storage[axis].kind == "O" for storage in owned)
        for axis in range(len(plan.mesh.axes))
    ]
    ranges = (range(n if is_owned else 1) for n, is_owned in zip(plan.mesh.sizes, axes, strict=True))
    places = itertools.product(*ranges)
    return tuple(each for each in places if plan.mesh.rank_at(each) < plan.mesh.ranks)


def positions_of_owners(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Mesh coordinates of the ranks that own parameters; 0 along axes without owners."""
    layouts = [how.storage for how in plan.parameters.values()]
    owners = (
        sorted({layout[axis].owner for layout in layouts if layout[axis].kind == "O"} - {ANY})
        for axis in range(len(plan.mesh.axes))
    )
    return tuple(itertools.product(*(found or [0] for found in owners)))


def owned_share(storage: Layout, position: Position, sizes: Sizes) -> Quantity:
    """Fraction of a parameter that the rank at these coordinates owns: 1, 0, or 1 / n if no owner is chosen yet."""
    share: Quantity = 1
    for axis, state in enumerate(storage):
        if state.kind == "O" and state.owner == ANY:
            share = share / sizes.axis(axis)
        elif state.kind == "O" and state.owner != position[axis]:
            return 0
    return share


def is_own_copy(storage: Layout, resident: Layout) -> bool:
    """Whether the owner uses its stored parameter as the resident copy, so that only the other ranks need a copy."""
    return all(a == b or (b.kind in "RV" and a.kind in "ORV") for a, b in zip(storage, resident, strict=True))
