"""Owners of parameters: chooses the rank of an axis that stores a parameter, if the search wants one rank to do so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir import ANY, Graph, Mesh, O, ParameterPlan, local_elements
from autopar.ir.note import Note
from autopar.search.recipe_rows import Recipe
from autopar.units import format_bytes


def with_owners(
    graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh, recipes: Sequence[Recipe]
) -> dict[str, ParameterPlan]:
    """The same parameters with an owner in place of each `O(*)`, so that all ranks own about as many bytes.

    In the order of their sizes, largest first, each parameter goes to the rank of the axis that owns least so far. The
    busiest rank then owns at most 4/3 of the least possible (Graham, Bounds on multiprocessing timing anomalies, 1969).
    A rank that runs all ops, while the others serve, owns nothing. A parameter that stands for those of several layers
    keeps `O(*)`, because each of them may have another owner; with a single server it is that one.
    """
    found = dict(parameters)
    for axis, row in enumerate(recipes):
        found |= _along(axis, graph, found, mesh, row.worker)
    return found


def _along(
    axis: int, graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh, worker: int | None
) -> dict[str, ParameterPlan]:
    serving = [rank for rank in range(mesh.sizes[axis]) if rank != worker]
    open_bytes = {
        name: _bytes(graph, name, how, mesh)
        for name, how in parameters.items()
        if how.storage[axis] == O(ANY) and (len(serving) == 1 or graph.stands_for.get(name, 1) == 1)
    }
    owned_bytes = dict.fromkeys(serving, 0)
    found = {}
    for name in sorted(open_bytes, key=lambda name: -open_bytes[name]):
        owner = min(serving, key=owned_bytes.__getitem__)
        owned_bytes[owner] += open_bytes[name]
        how = parameters[name]
        storage = (*how.storage[:axis], O(owner), *how.storage[axis + 1 :])
        found[name] = replace(how, storage=storage)
    return found


def _bytes(graph: Graph, name: str, how: ParameterPlan, mesh: Mesh) -> int:
    tensor = graph.tensors[graph.parameters[name]].at_rest
    count = int(graph.stands_for.get(name, 1))
    return count * local_elements(tensor.dims, how.storage, mesh) * tensor.itemsize_bytes


def owner_notes(
    graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh
) -> tuple[Note, ...]:
    """A sentence for each axis along which parameters have owners: how many bytes each rank owns."""
    notes = []
    for axis, (name, size) in enumerate(mesh.axes):
        owned_bytes = [0.0] * size
        for parameter, how in parameters.items():
            state, own = how.storage[axis], _bytes(graph, parameter, how, mesh)
            if state == O(ANY):
                owned_bytes = [each + own / size for each in owned_bytes]
            elif state.kind == "O":
                owned_bytes[state.owner] += own
        if any(owned_bytes):
            each = ", ".join(
                f"{format_bytes(owned)} on rank {i}" for i, owned in enumerate(owned_bytes) if owned
            )
            notes.append(
                Note(f"along {name} one rank stores and updates each parameter: {each}", "owners")
            )
    return tuple(notes)
