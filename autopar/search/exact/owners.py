"""Owners of parameters: chooses the rank of an axis that stores a parameter, if the search wants one rank to do so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.errors import RecipeError
from autopar.ir import ANY, Graph, Mesh, O, ParameterPlan, Plan, local_elements
from autopar.ir.note import Note
from autopar.search.request.recipe_rows import Recipe
from autopar.search.request.single_rank_ops import LonePins
from autopar.units import counted, format_bytes


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
        if how.storage[axis] == O(ANY) and (len(serving) == 1 or graph.layer_count.get(name, 1) == 1)
    }
    found = {}
    for name, owner in _shared_out(open_bytes, serving).items():
        how = parameters[name]
        storage = (*how.storage[:axis], O(owner), *how.storage[axis + 1 :])
        found[name] = replace(how, storage=storage)
    return found


def _shared_out(sizes_bytes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Name -> the rank that it goes to: in the order of sizes, largest first, the one with the fewest bytes so far."""
    owned_bytes = dict.fromkeys(ranks, 0)
    found = {}
    for name in sorted(sizes_bytes, key=lambda name: -sizes_bytes[name]):
        found[name] = owner = min(ranks, key=owned_bytes.__getitem__)
        owned_bytes[owner] += sizes_bytes[name]
    return found


def on_mesh(
    graph: Graph, plan: Plan, mesh: Mesh, recipes: Sequence[Recipe], alone: LonePins, fixed: Collection[str] = ()
) -> Plan:
    """The plan for a mesh with vacant places, given the plan for the same mesh without: its servers own parameters.

    The worker row is whole. The ranks of other rows share out the parameters that have an owner along the first axis.

    Args:
        graph: the captured model.
        plan: plan with the recipe `serve` along the first axis.
        mesh: the mesh with vacant places.
        recipes: rows of the axes.
        alone: ops that single ranks run.
        fixed: parameters that stay as they are, because they are placed already.

    Raises RecipeError where another recipe needs somebody at every place, or an op draws random numbers.
    """
    _check_vacancy(mesh, recipes, alone)
    worker = recipes[0].worker
    serving = [rank for rank in range(mesh.ranks) if mesh.coordinates(rank)[0] != worker]
    on_one = (O(0),) * len(mesh.axes)
    open_bytes = {
        name: _bytes(graph, name, replace(how, storage=on_one), mesh)
        for name, how in plan.parameters.items()
        if how.storage[0].kind == "O" and name not in fixed
    }
    parameters = dict(plan.parameters)
    for name, rank in _shared_out(open_bytes, serving).items():
        storage = tuple(map(O, mesh.coordinates(rank)))
        parameters[name] = replace(parameters[name], storage=storage)
    return replace(plan, mesh=mesh, parameters=parameters)


def _check_vacancy(mesh: Mesh, recipes: Sequence[Recipe], alone: LonePins) -> None:
    """Raises RecipeError unless the ranks of a mesh with vacant places can carry out its recipes."""
    row, asked = mesh.size // mesh.sizes[0], f"The mesh {mesh} has vacant places"
    if recipes[0].worker is None:
        raise RecipeError(
            f"{asked}, which only the recipe serve supports, but the recipe of {mesh.names[0]}, its first axis, is "
            f"{recipes[0].name}. Write recipe={{{mesh.names[0]!r}: 'serve'}}, or give the mesh a rank at every place."
        )
    if mesh.ranks <= row:
        raise RecipeError(
            f"{asked}: along {mesh.names[0]} some ranks work and others serve, each kind on up to {row} places, but "
            f"there are only {counted(mesh.ranks, 'rank')}. Start at least {row + 1} ranks, or give the mesh a rank at "
            "every place."
        )
    for axis, each in zip(mesh.names[1:], recipes[1:], strict=True):
        if not {0, 3} & {*each.stages} or each.worker is not None:
            raise RecipeError(
                f"{asked}, but the recipe {each.name} of the axis {axis} stores parts of a parameter at several of "
                "them; a single server stores it whole. Take ddp, zero3 or tp."
            )
    if alone.drawing:
        raise RecipeError(
            f"{asked}, but {counted(alone.drawing, 'op')} of the model draw random numbers, which takes all places. "
            "Leave out dropout, or give the mesh a rank at every place."
        )


def _bytes(graph: Graph, name: str, how: ParameterPlan, mesh: Mesh) -> int:
    tensor = graph.tensors[graph.parameters[name]].at_rest
    count = int(graph.layer_count.get(name, 1))
    return count * local_elements(tensor.dims, how.storage, mesh) * tensor.itemsize_bytes


def owner_notes(graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh) -> tuple[Note, ...]:
    """A sentence for each axis along which parameters have owners: how many bytes each rank owns."""
    notes = []
    if mesh.occupied is not None:
        return _notes_by_rank(graph, parameters, mesh)
    for axis, (name, size) in enumerate(mesh.axes):
        owned_bytes = [0.0] * size
        for parameter, how in parameters.items():
            state, own = how.storage[axis], _bytes(graph, parameter, how, mesh)
            if state == O(ANY):
                owned_bytes = [each + own / size for each in owned_bytes]
            elif state.kind == "O":
                owned_bytes[state.owner] += own
        if any(owned_bytes):
            each = ", ".join(f"{format_bytes(owned)} on rank {i}" for i, owned in enumerate(owned_bytes) if owned)
            notes.append(Note(f"along {name} one rank stores and updates each parameter: {each}", "owners"))
    return tuple(notes)


def _notes_by_rank(graph: Graph, parameters: Mapping[str, ParameterPlan], mesh: Mesh) -> tuple[Note, ...]:
    """A sentence on how many bytes each rank of a mesh with vacant places owns."""
    owned_bytes = dict[int, int]()
    for parameter, how in parameters.items():
        if all(state.kind == "O" for state in how.storage):
            rank = mesh.rank_at([state.owner for state in how.storage])
            own = _bytes(graph, parameter, how, mesh)
            owned_bytes[rank] = owned_bytes.get(rank, 0) + own
    each = ", ".join(f"{format_bytes(owned)} on rank {i}" for i, owned in sorted(owned_bytes.items()))
    text = f"one of the {mesh.ranks} ranks stores and updates each parameter: {each}"
    return (Note(text, "owners"),) if each else ()
