"""Checks for meshes whose last places are vacant, that is, have no rank.

A *line* is the ranks that differ along one axis alone: those of one process group. On `ps=2,dp=3 of 4`

    ps \\ dp    0  1  2
       0       0  1  2      the line along dp is whole
       1       3  -  -      the line along dp has a rank and two vacant places

A step of a conversion is run by those lines along its axis that have some of the tensor. A state O along another axis
leaves out all lines but the owner's. Each of these lines must be whole, or vacant as a whole, with two exceptions.
From R to O(i), and from O(i) to R, a line needs the rank i alone, because the others at most get a copy; and from O(i)
to O(j) it needs the ranks i and j. So the batch can be split among three workers, while a fourth rank keeps the
parameters: everything that is split lies in O(0) along ps.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.layout import Layout, State
from autopar.ir.mesh import Mesh


def partly_vacant(mesh: Mesh, layout: Layout, axis: int) -> Iterator[tuple[int, ...]]:
    """Yields the lines along an axis that have some of a tensor, and have both ranks and vacant places."""
    for place in range(mesh.size):
        position = mesh.coordinates(place)
        has_some = all(
            state.kind != "O" or state.owner == at or other == axis
            for other, (state, at) in enumerate(zip(layout, position, strict=True))
        )
        line = mesh.peers(place, axis)
        if has_some and not position[axis] and line[0] < mesh.ranks <= line[-1]:
            yield line


def can_step(mesh: Mesh, layout: Layout, axis: int, target: State) -> bool:
    """Whether the ranks of a mesh can take a tensor in a layout to another state along one axis.

    >>> from autopar.ir import O, R, S
    >>> mesh = Mesh.parse("ps=2,dp=3 of 4")
    >>> can_step(mesh, (O(0), S(0)), 1, R), can_step(mesh, (R, S(0)), 1, R), can_step(mesh, (R, R), 0, O(0))
    (True, False, True)
    """
    if mesh.occupied is None or mesh.sizes[axis] == 1:
        return True
    source = layout[axis]
    lines = partly_vacant(mesh, layout, axis)
    if "O" in (source.kind, target.kind) and {source.kind, target.kind} <= {"O", "R"}:
        owners = [state.owner for state in (source, target) if state.kind == "O"]
        return all(line[owner] < mesh.ranks for line in lines for owner in owners)
    return not any(lines)


def has_all(mesh: Mesh, layout: Layout) -> bool:
    """Whether the ranks of a mesh hold all parts of a tensor in this layout.

    >>> from autopar.ir import O, S
    >>> mesh = Mesh.parse("ps=2,dp=3 of 4")
    >>> has_all(mesh, (O(0), S(0))), has_all(mesh, (O(1), O(0))), has_all(mesh, (O(1), S(0)))
    (True, True, False)
    """
    parts = set[tuple[int, ...]]()
    present = set[tuple[int, ...]]()
    for place in range(mesh.size):
        position = mesh.coordinates(place)
        states = list(zip(layout, position, strict=True))
        if any(state.kind == "O" and state.owner != at for state, at in states):
            continue
        # what a copy has does not depend on where it is
        part = tuple(0 if state.kind == "R" else at for state, at in states)
        parts.add(part)
        if place < mesh.ranks:
            present.add(part)
    return parts == present
