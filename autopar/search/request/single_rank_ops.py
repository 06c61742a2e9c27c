"""Pins that leave ops to one rank of an axis, such as `{"towers.left.*": "@0"}`: read, and put into a plan.

The pattern names a submodule, with all that it contains, or ops. The text is the choice `@i`, with an axis behind it
(`@0@tp`) where the mesh has several. `@*` leaves the choice of ranks to autopar: the matched ops fall into branches
that do not depend on each other, and each branch goes to the rank with the least work so far, the longest branch first.
The busiest rank then has at most 4/3 of the least possible work (Graham, Bounds on multiprocessing timing anomalies,
1969). The search of layouts knows nothing of these ops. They are put into the plan that
it found:

    op              the label `@i` along the axis; on all ranks if the op draws random numbers
    parameter       stored and used by rank i alone, if all its uses are ops of this rank; stored elsewhere under a
                    recipe whose other ranks serve
    input           whole on every rank along the axis, because a rank takes its part of an input without communication
    everything else as the search found it, or, under the recipe `auto`, unsplit along the axis, whichever is faster
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.errors import MeshError, RecipeError
from autopar.ir import (
    ANY,
    OWNED,
    UNSPLIT,
    Graph,
    Labels,
    Layout,
    Mesh,
    O,
    Op,
    ParameterPlan,
    Plan,
    R,
    State,
    is_legal,
    lies_in_chunks,
    uneven_axes,
    why_not_alone,
)
from autopar.ir.files import COUNT
from autopar.ir.note import Note
from autopar.search.request.connected import connected
from autopar.search.request.pins import Pinned
from autopar.search.request.recipe_rows import Recipe
from autopar.units import counted

_PIN = re.compile(rf"{OWNED}({COUNT}|\*)(@.+)?")


@dataclass(frozen=True)
class LonePins:
    """Ops that single ranks run.

    Attributes:
        owners: op name -> index of an axis -> position along it of the rank that runs the op.
        drawing: number of matched ops that stay on all ranks, because they draw random numbers.
        served: indices of the axes along which other ranks than the owner of the ops store the parameters.
    """

    owners: Mapping[str, Mapping[int, int]]
    drawing: int = 0
    served: frozenset[int] = frozenset()


def is_lone_pin(text: str) -> bool:
    """Whether the text of a pin leaves ops to one rank.

    >>> is_lone_pin("@0"), is_lone_pin("@1@tp"), is_lone_pin("S(0)@tp")
    (True, True, False)
    """
    return any(_PIN.fullmatch(part) for part in text.split())


def with_workers(pins: LonePins, graph: Graph, mesh: Mesh, recipes: Sequence[Recipe]) -> LonePins:
    """The same with all ops on one rank of each axis whose recipe says so (`Recipe.worker`).

    Raises RecipeError for a pin that gives an op to another rank of such an axis.
    """
    working = {axis: row.worker for axis, row in enumerate(recipes) if row.worker is not None and mesh.sizes[axis] > 1}
    if not working:
        return pins
    for name, owners in pins.owners.items():
        for axis in owners.keys() & working:
            raise RecipeError(
                f"A pin gives {name} to @{owners[axis]}@{mesh.names[axis]}, but the recipe {recipes[axis].name} runs "
                f"all ops on rank {working[axis]} of this axis; leave out the pin, or take another recipe."
            )
    alone = {op.name: {**pins.owners.get(op.name, {}), **working} for op in graph.ops if not op.draws}
    drawing = sum(op.draws for op in graph.ops)
    return LonePins(alone, drawing, frozenset(working))


def without_lone_pins(pins: Mapping[str, str] | None) -> dict[str, str]:
    """The pins that the search of layouts takes."""
    return {pattern: text for pattern, text in (pins or {}).items() if not is_lone_pin(text)}


def resolve_lone_pins(
    pins: Mapping[str, str] | None, graph: Graph, mesh: Mesh, seconds: Callable[[Op], float]
) -> LonePins:
    """Matches pins such as `{"towers.left.*": "@0"}` with the ops of a graph, and chooses the ranks of `@*`.

    Args:
        pins: pattern -> text; pins of layouts are left out.
        graph: the captured model.
        mesh: mesh of the ranks.
        seconds: duration of an op on one rank, forward and backward.

    Raises RecipeError for a pin without an axis, with an owner out of range, or that matches no op, and for two pins
    that give an op to different ranks.
    """
    pinned: Pinned[str] = Pinned(mesh)
    drawing: set[str] = set()
    for pattern, text in (pins or {}).items():
        for part in text.split() if is_lone_pin(text) else ():
            axis, owner = _read(part, pattern, text, mesh)
            for op in _matching(pattern, graph):
                if op.draws:
                    drawing.add(op.name)
                else:
                    pinned.add(op.name, axis, owner, pattern)
    owners = {
        name: {axis: ANY if owner == "@*" else int(owner.removeprefix(OWNED)) for axis, owner in along}
        for name, along in pinned.resolved().items()
    }
    for axis, size in enumerate(mesh.sizes):
        _balance(owners, graph, axis, size, seconds)
    return LonePins(owners, len(drawing))


def _balance(
    owners: Mapping[str, dict[int, int]], graph: Graph, axis: int, size: int, seconds: Callable[[Op], float]
) -> None:
    """Chooses the ranks of an axis that run the ops with `@*`."""
    open_ops = [op for op in graph.ops if owners.get(op.name, {}).get(axis) == ANY]
    busy_seconds = [0.0] * size
    for op in graph.ops:
        if (owner := owners.get(op.name, {}).get(axis, ANY)) != ANY:
            busy_seconds[owner] += seconds(op)
    branches = [(sum(map(seconds, ops)), ops) for ops in _branches(open_ops, graph)]
    for duration, ops in sorted(branches, key=lambda branch: -branch[0]):
        owner = busy_seconds.index(min(busy_seconds))
        busy_seconds[owner] += duration
        for op in ops:
            owners[op.name][axis] = owner


def _branches(ops: Sequence[Op], graph: Graph) -> list[list[Op]]:
    """The ops in groups that do not use each other's results, in the order of their first ops."""
    by_name = {op.name: op for op in ops}
    makers = ((graph.producer.get(name), op.name) for op in ops for name in op.operands)
    pairs = ((made.name, name) for made, name in makers if made and made.name in by_name)
    return [[op for op in ops if op.name in group] for group in connected(by_name, pairs)]


def _read(part: str, pattern: str, text: str, mesh: Mesh) -> tuple[int, str]:
    """Axis and owner of a text such as `@0` or `@0@tp`: 0 or 1, and `@0`."""
    if not _PIN.fullmatch(part):
        raise RecipeError(
            f"The pin {pattern!r}: {text!r} mixes {part}, a choice of layouts, with a choice of a rank; write two pins."
        )
    number, _, name = part.removeprefix(OWNED).partition("@")
    if not name and len(mesh.axes) > 1:
        long = [f"{part}@{axis}" for axis, size in mesh.axes if number == "*" or int(number) < size]
        raise RecipeError(
            f"The pin {pattern!r}: {text!r} names no axis, but the mesh {mesh} has {len(mesh.axes)} axes; "
            f"{'write ' + ' or '.join(long) if long else f'none of them has {int(number) + 1} ranks'}."
        )
    try:
        axis = mesh.index(name) if name else 0
    except MeshError as error:
        raise RecipeError(f"The pin {pattern!r}: {text!r} cannot hold: {error}") from None
    name, size = mesh.axes[axis]
    if number != "*" and int(number) >= size:
        raise RecipeError(
            f"The pin {pattern!r} asks for rank {number} of the axis {name}, but it has {counted(size, 'rank')}, "
            f"counted from 0; write @0@{name} to @{size - 1}@{name}, or give {name} at least {int(number) + 1} ranks."
        )
    return axis, f"{OWNED}{number}"


def _matching(pattern: str, graph: Graph) -> list[Op]:
    found = [op for op in graph.ops if _matches(op, pattern)]
    if not found:
        modules = list(dict.fromkeys(op.module for op in graph.ops if op.module))
        some = ", ".join(modules[:3]) or graph.ops[0].name
        raise RecipeError(
            f"The pin {pattern!r} matches no submodule and no op of the model; the {len(modules)} submodules that "
            f"compute something are named like {some}."
        )
    return found


def _matches(op: Op, pattern: str) -> bool:
    """Whether a pattern names an op, its submodule, or one that contains it."""
    return (
        fnmatchcase(op.name, pattern)
        or fnmatchcase(f"{op.module}.", pattern)
        or fnmatchcase(op.module, pattern)
        or fnmatchcase(op.module, f"{pattern}.*")
    )


def lone_notes(pins: LonePins) -> tuple[Note, ...]:
    """A sentence about matched ops that stay on all ranks."""
    if not pins.drawing:
        return ()
    ops = "1 op" if pins.drawing == 1 else f"{pins.drawing} ops"
    return (
        Note(
            f"{ops} that {'the recipe leaves' if pins.served else 'the pins leave'} to one rank run on all ranks, "
            "because they draw random numbers",
            "owners",
        ),
    )


def with_lone_ops(
    graph: Graph,
    plan: Plan,
    pins: LonePins,
    *,
    fixed: Mapping[str, ParameterPlan],
    opens: Sequence[bool],
    seconds: Callable[[Plan], float],
) -> Plan:
    """The fastest plan that leaves ops to single ranks and is otherwise the given one, or unsplit along their axes.

    Args:
        graph: the captured model.
        plan: plan without ops of one rank.
        pins: ops of single ranks.
        fixed: parameters that stay as they are, because they are placed already.
        opens: for each axis, whether its recipe is `auto`, so that ops may run unsplit.
        seconds: the price of a plan.
    """
    axes = sorted({axis for owners in pins.owners.values() for axis in owners})
    given = [_put(graph, plan, pins, fixed, [])]
    unsplit = [axis for axis in axes if opens[axis] and not fixed]
    if unsplit:
        given.append(_put(graph, plan, pins, fixed, unsplit))
    return min((p for p in given if all(is_legal(graph, op, p.ops[op.name], p.mesh) for op in graph.ops)), key=seconds)


def _put(graph: Graph, plan: Plan, pins: LonePins, fixed: Mapping[str, ParameterPlan], unsplit: Sequence[int]) -> Plan:
    """The plan with ops of single ranks, and all other ops unsplit along some axes."""

    def labels(op: Op) -> Labels:
        owners = pins.owners.get(op.name, {})
        found = list(plan.ops[op.name])
        for axis in unsplit:
            found[axis] = UNSPLIT
        for axis, owner in owners.items():
            found[axis] = f"{OWNED}{owner}"
        return tuple(found)

    ops = {op.name: labels(op) for op in graph.ops}
    refused = {op.name: why_not_alone(op, ops[op.name], plan.mesh) for op in graph.ops if op.name in pins.owners}
    for name, why in refused.items():
        if why:
            asked = "What the recipe asks of" if pins.served else "The pin of"
            raise RecipeError(f"{asked} {name}, {' '.join(ops[name])}, cannot hold: {why}.")
    owned = {
        name: owners
        for name, owners in _owned(graph, pins)
        if _can_own(graph, plan, name, _stored(plan.parameters[name], owners, unsplit, pins.served))
    }
    axes = {axis for owners in pins.owners.values() for axis in owners}
    return replace(
        plan,
        ops=ops,
        parameters={
            name: how if name in fixed else _stored(how, owned.get(name, {}), unsplit, pins.served)
            for name, how in plan.parameters.items()
        },
        inputs={
            name: tuple(R if axis in axes else state for axis, state in enumerate(layout))
            for name, layout in plan.inputs.items()
        },
    )


def _can_own(graph: Graph, plan: Plan, name: str, how: ParameterPlan) -> bool:
    """Whether a parameter with owners can be stored so: in one run of each dim, and in parts of one size."""
    dims = graph.tensors[graph.parameters[name]].dims
    return lies_in_chunks(dims, how.storage, plan.mesh) and not uneven_axes(dims, how.storage, plan.mesh)


def _stored(
    how: ParameterPlan, owners: Mapping[int, int], unsplit: Sequence[int], served: Container[int]
) -> ParameterPlan:
    """The parameter with its owners, and whole on every rank along axes where nothing is split.

    Along an axis in `served` the owner of the ops has it during a step alone.
    """
    used = {axis: O(owner) for axis, owner in owners.items()}
    stored = {axis: state for axis, state in used.items() if axis not in served}

    def states(layout: Layout, owned: Mapping[int, State]) -> Layout:
        return tuple(owned.get(axis, R if axis in unsplit else state) for axis, state in enumerate(layout))

    return replace(how, storage=states(how.storage, stored), resident=states(how.resident, used))


def _owned(graph: Graph, pins: LonePins) -> Iterator[tuple[str, dict[int, int]]]:
    """Yields each parameter that ops of one rank alone use, with its owners by axis."""
    for name, tensor in graph.parameters.items():
        users = [pins.owners.get(op.name, {}) for op in graph.ops if tensor in op.operands]
        common = {
            axis: owner
            for axis, owner in (users[0] if users else {}).items()
            if all(each.get(axis) == owner for each in users)
        }
        if common and graph.tensors[tensor].dims:
            yield name, common
