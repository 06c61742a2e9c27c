"""Checks that the ranks of a mesh with vacant places can carry out a plan; see `autopar.ir.vacancy`."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import LayoutError, PlanError
from autopar.ir import (
    UNSPLIT,
    Graph,
    Labels,
    Layout,
    Mesh,
    O,
    Op,
    Plan,
    R,
    format_layout,
    has_all,
    owner_of,
    partly_vacant,
    steps_of,
)


def check_vacant_places(graph: Graph, plan: Plan) -> None:
    """Raises PlanError for an op or a tensor that needs somebody at a vacant place.

    Raises LayoutError for a parameter whose conversion does.
    """
    mesh = plan.mesh
    if mesh.occupied is None:
        return
    for what, layout in _tensors(plan):
        if not has_all(mesh, layout):
            raise PlanError(
                f"The plan has {what} in {format_layout(layout, mesh)}, but a part of it would be at a vacant place of "
                f"the mesh {mesh}; give it to one of the {mesh.ranks} ranks."
            )
    for name, how in plan.parameters.items():
        if len({state.kind for state in how.storage}) > 1 or how.storage[0].kind == "S":
            raise PlanError(
                f"The plan stores parameter {name} in {format_layout(how.storage, mesh)}. On a mesh with vacant places "
                "one rank stores it (O on every axis), or all do (R)."
            )
        dims = graph.tensors[graph.parameters[name]].dims
        try:
            steps_of(dims, how.storage, how.resident, mesh)
        except LayoutError as error:
            raise LayoutError(f"Parameter {name} of the plan: {error}") from None
    for op in graph.ops:
        _check_op(op, plan.ops[op.name], mesh)


def _tensors(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Every parameter and input in words, with its layouts."""
    for name, how in plan.parameters.items():
        yield f"parameter {name}", how.storage
        yield f"parameter {name}", how.resident
    for name, layout in plan.inputs.items():
        yield f"input {name}", layout


def _check_op(op: Op, labels: Labels, mesh: Mesh) -> None:
    owners = [owner_of(label) for label in labels]
    owned = tuple(R if owner is None else O(owner) for owner in owners)
    if not has_all(mesh, owned):
        raise PlanError(
            f"The plan runs op {op.name} ({op.kind}) at a vacant place of the mesh {mesh} ({' '.join(labels)}); give "
            "it to another rank."
        )
    for axis, label in enumerate(labels):
        shares = label != UNSPLIT and owners[axis] is None
        if shares and any(partly_vacant(mesh, owned, axis)):
            raise PlanError(
                f"The plan splits op {op.name} ({op.kind}) along {mesh.names[axis]} ({' '.join(labels)}), but some of "
                f"the places that would get a part are vacant on the mesh {mesh}. Leave it to one rank of another "
                "axis, such as @0, for which no place along this axis is vacant."
            )
