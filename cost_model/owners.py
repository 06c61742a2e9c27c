"""What a parameter takes that one rank of an axis owns: by rank, and on the busiest owner.

Every rank holds the resident copy for a step, and its gradient until that is reduced. The owner alone keeps the
stored parameter and the optimizer's states, and updates them. A plan's memory and its optimizer's time are those of
the rank that owns most; where no owner is decided yet (`O(*)`), every rank owns an equal share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.cost_model.arith import Quantity
from autopar.cost_model.sizes import Sizes
from autopar.ir import ANY, Graph, Layout, Mesh, ParameterPlan, has_owner, local_elements

Position = Sequence[int]


def busiest_owner(graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh) -> Position:
    """The coordinates of the rank that owns most bytes; of several the first.

    An axis along which nothing is owned has the coordinate 0.
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
            count = graph.stands_for.get(name, 1)
            found += count * size * owned_share(storage, position, Sizes(mesh))
        return found

    return max(itertools.product(*axes), key=owned_bytes)


def owned_share(storage: Layout, position: Position, sizes: Sizes) -> Quantity:
    """The share of a parameter that the rank at a position owns: 1, 0, or 1 / n where that is open."""
    share: Quantity = 1
    for axis, state in enumerate(storage):
        if state.kind == "O" and state.owner == ANY:
            share = share / sizes.axis(axis)
        elif state.kind == "O" and state.owner != position[axis]:
            return 0
    return share


def is_own_copy(storage: Layout, resident: Layout) -> bool:
    """Whether the owner uses the stored parameter itself, because the others alone need a copy."""
    return all(
        a == b or (b.kind in "RV" and a.kind in "ORV")
        for a, b in zip(storage, resident, strict=True)
    )
