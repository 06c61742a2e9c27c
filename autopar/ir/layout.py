"""Layouts: how one tensor lies on the mesh.

For each mesh axis a tensor is in one of five states (docs/plans.md):

    R        replicated, and every rank does the same with it       gradient: R
    V        replicated, but each rank does different work with it   gradient: P
    S(d.f)   split along factor f of dim d                           gradient: S(d.f)
    P        partial: the value is the sum over the axis             gradient: R
    O(i)     rank i of the axis holds all of it, the others nothing  gradient: O(i)

A *factor* is one of the sizes whose product is the size of a dim, most significant first. After
`x.view(32, 128)` of a dim of size 4096, that dim has the factors (32, 128) in every tensor that it runs through,
and S(0.1) splits the 128. When two axes split the same factor, one of them is the major one: it cuts the factor, and
the other cuts the pieces. It is the earlier axis of the mesh, as in DTensor, unless states say how *deep* axes lie.
S(d.*) cuts dim d into contiguous chunks whatever its factors are. Where ranks do not divide what they split, they have
parts of different sizes (`autopar.ir.uneven`). Only parameters between steps ("at rest") are in S(d.*). Parameters, and
the operands and results of ops that one rank runs alone (`@i`), are in O(i).

Local shapes have the sizes of every rank where these differ (`autopar.ir.share`). Under O(i) the other ranks hold a
tensor of the same shape with a first dim of 0, see `autopar.ops.collectives.seen`.

Grammar of the text:  state = "R" | "V" | "P" | "S(" dim ["." (factor | "*")] ")"
                              | "O(" (rank | "*") ")"
                      layout = "R" | state "@" axis {" " state "@" axis}       (axes in R are left out)

Axes that split one factor stand in their order, the major one first: `S(0)@k S(0)@i` on the mesh i=2,k=2.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

from autopar.errors import LayoutError
from autopar.ir.files import COUNT
from autopar.ir.mesh import Mesh
from autopar.ir.share import Share

Dims = tuple[tuple[int, ...], ...]  # for every dim of a tensor the sizes of its factors; a dim of size 1 is (1,) or ()
WHOLE = -1  # value of `State.factor` in S(d.*)
ANY = -1  # value of `State.owner` in O(*): the search has not chosen the owner yet, see `autopar.search.exact.owners`


class State(NamedTuple):
    """State of a tensor along one mesh axis. Only S uses `dim`, `factor` and `depth`, and only O uses `owner`.

    Axes that split the same factor nest by their depth, and axes of the same depth in the order of the mesh. Depths are
    the least that say so, see `nested`. A named tuple, because searches hash states by the million.

    Where an op keeps rows that its ranks exchanged, the fullest has `stretch` times the mean (`autopar.analysis.skew`).
    """

    kind: Literal["O", "P", "R", "S", "V"]
    dim: int = -1
    factor: int = 0
    owner: int = ANY
    depth: int = 0
    stretch: float = 1.0

    def __str__(self) -> str:
        if self.kind == "O":
            return f"O({'*' if self.owner == ANY else self.owner})"
        if self.kind != "S":
            return self.kind
        suffix = {0: "", WHOLE: ".*"}.get(self.factor, f".{self.factor}")
        return f"S({self.dim}{suffix})"

    def splits_as(self, other: State) -> bool:
        """Whether both states split the same factor, at any depth."""
        return self.kind == other.kind == "S" and self[1:3] == other[1:3]

    @classmethod
    def parse(cls, text: str) -> State:
        """Reads `R`, `V`, `P`, `S(1)`, `S(1.2)`, `S(1.*)`, `O(1)` or `O(*)`, the inverse of `str`."""
        if text in ("R", "V", "P"):
            return cls(text)  # type: ignore[arg-type]
        if owner := re.fullmatch(rf"O\(({COUNT}|\*)\)", text):
            return O(ANY if owner[1] == "*" else int(owner[1]))
        match = re.fullmatch(rf"S\(({COUNT})(?:\.({COUNT}|\*))?\)", text)
        if not match:
            raise LayoutError(f"Cannot read the state {text!r}; write R, V, P, S(0), S(0.1), S(0.*) or O(0).")
        factor = match[2] or "0"
        return cls("S", int(match[1]), WHOLE if factor == "*" else int(factor))


R = State("R")
V = State("V")
P = State("P")


@functools.cache
def S(dim: int, factor: int = 0) -> State:
    """The state of a tensor that is split along `factor` of `dim`; `factor=WHOLE` cuts the dim into contiguous chunks.

    >>> str(S(1)), str(S(1, 2)), str(S(1, WHOLE))
    ('S(1)', 'S(1.2)', 'S(1.*)')
    """
    return State("S", dim, factor)


@functools.cache
def O(owner: int) -> State:  # noqa: E743
    """The state of a tensor that rank `owner` of the axis (counted from 0) holds alone and whole."""
    return State("O", owner=owner)


Layout = tuple[State, ...]  # one state per mesh axis, in the order of the axes


def format_layout(layout: Layout, mesh: Mesh) -> str:
    """Text of a layout; the inverse of `parse_layout`.

    >>> from autopar.ir import Mesh
    >>> format_layout((S(0), R), Mesh.parse("dp=2,tp=4"))
    'S(0)@dp'
    """
    axes = (axis for axis in in_nesting_order(layout) if layout[axis] != R)
    return " ".join(f"{layout[axis]}@{mesh.names[axis]}" for axis in axes) or "R"


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Reads a layout such as `S(1)@tp P@dp`: `state@axis`, separated by spaces.

    The states are those of `State`. An axis that is not named is replicated (`R`). Of axes that split the same factor
    the first is the major one.

    Raises LayoutError for no state, an unknown one, two for one axis or an owner that the axis does not have, and
    MeshError for an axis that is not in the mesh.

    >>> from autopar.ir import Mesh
    >>> parse_layout("S(1)@tp", Mesh.parse("dp=2,tp=4")) == (R, S(1))
    True
    """
    layout: dict[int, State] = {}
    parts = text.split()
    if not parts:
        raise LayoutError("A layout is empty; write R for a tensor that each rank has whole.")
    for part in parts:
        if part == "R":
            continue
        state, at, name = part.partition("@")
        if not at:
            raise LayoutError(f"The layout {text!r} names no axis in {part!r}; write S(0)@dp.")
        axis = mesh.index(name)
        if axis in layout:
            raise LayoutError(
                f"The layout {text!r} has two states for the axis {name}, {layout[axis]} and {state}; write one."
            )
        layout[axis] = _canonical(State.parse(state))
        if layout[axis].owner >= mesh.sizes[axis]:
            raise LayoutError(
                f"The layout {text!r} gives the tensor to rank {layout[axis].owner} of the axis {name}, which has "
                f"{mesh.sizes[axis]} ranks, counted from 0; write O(0) to O({mesh.sizes[axis] - 1})."
            )
    return nested([layout.get(axis, R) for axis in range(len(mesh.axes))], list(layout))


def axes_along(layout: Sequence[State], state: State) -> list[int]:
    """Positions of the axes that split the same factor as `state` does, the major one first."""
    return [axis for axis in in_nesting_order(layout) if layout[axis].splits_as(state)]


def in_nesting_order(layout: Sequence[State]) -> list[int]:
    """Positions of all axes in their order, except that those which split one factor stand as they nest."""
    if not any(state.depth for state in layout):
        return list(range(len(layout)))
    return by_depth(_shared(layout), [state.depth for state in layout])


def nested(layout: Sequence[State], order: Sequence[int]) -> Layout:
    """The layout whose axes nest in another order where they split the same factor.

    Args:
        layout: a state for every axis; depths are ignored.
        order: positions of axes, the major one first, among them all that share a factor.

    >>> nested((S(0), S(0), R), (1, 0, 2))[0].depth
    1
    """
    result = [state._replace(depth=0) if state.depth else state for state in layout]
    for axis, depth in depths(_shared(result), order):
        result[axis] = result[axis]._replace(depth=depth)
    return tuple(result)


def depths(shared: Sequence[Hashable], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the axes that lie deeper than the order of the mesh says, each with the least depth that says so.

    Args:
        shared: what each axis splits; axes that split the same nest. None for an axis that splits nothing.
        order: positions of axes, the major one first, among them all that share what they split.
    """
    last: dict[Hashable, tuple[int, int]] = {}  # what is split -> the axis before and its depth
    for axis in order:
        what = shared[axis]
        if what is not None:
            before, depth = last.get(what, (-1, 0))
            last[what] = axis, depth + (axis < before)
            if last[what][1]:
                yield axis, last[what][1]


def by_depth(shared: Sequence[Hashable], deep: Sequence[int]) -> list[int]:
    """Positions of all axes in their order, except that those which split the same stand by their depth.

    Args:
        shared: what each axis splits.
        deep: the depth of each axis.

    >>> by_depth(("k", "b", "k"), (1, 0, 0))
    [2, 1, 0]
    """
    order = sorted(range(len(shared)), key=deep.__getitem__)
    waiting = {what: iter([axis for axis in order if shared[axis] == what]) for what in shared}
    return [next(waiting[what]) for what in shared]


def _shared(layout: Sequence[State]) -> list[Hashable]:
    """The dim and factor that each axis splits; None for an axis that splits nothing."""
    return [state[:3] if state.kind == "S" else None for state in layout]


def _canonical(state: State) -> State:
    """The module's own object `R`, `V` or `P` for an equal state, so that `state is R` holds after parsing."""
    return {"R": R, "V": V, "P": P}.get(state.kind, state)


def has_owner(layout: Layout) -> bool:
    """Whether the layout has the state O along some axis: one rank there holds the whole tensor."""
    return any(state.kind == "O" for state in layout)


def split_count(layout: Layout, mesh: Mesh, dim: int, factor: int) -> int:
    """Number of parts into which the layout splits one factor of a dim: the product of the sizes of those axes."""
    parts = 1  # a loop, because a search asks this most often of all
    for state, size in zip(layout, mesh.sizes, strict=True):
        if state.kind == "S" and state.dim == dim and state.factor == factor:
            parts *= size
    return parts


def local_factors(dims: Dims, layout: Layout, mesh: Mesh) -> Dims:
    """Factor sizes of the part of a tensor that a rank holds; a dim in S(d.*) has one factor, the size of the chunk."""
    return tuple(_local_dim(sizes, layout, mesh, dim) for dim, sizes in enumerate(dims))


def _local_dim(sizes: tuple[int, ...], layout: Layout, mesh: Mesh, dim: int) -> tuple[int, ...]:
    if split_count(layout, mesh, dim, WHOLE) > 1:
        return (_part(math.prod(sizes), layout, mesh, S(dim, WHOLE)),)
    return tuple(_part(size, layout, mesh, S(dim, factor)) for factor, size in enumerate(sizes))


def _part(size: int, layout: Layout, mesh: Mesh, state: State) -> int:
    """A rank's part of a factor, which the axes along `state` cut one after the other."""
    count = split_count(layout, mesh, state.dim, state.factor)
    if size % count == 0:
        return size // count
    return parts_of(size, tuple(axes_along(layout, state)), mesh)[1]


@functools.cache
def parts_of(size: int, axes: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """Where the part of every rank begins, and its size, if axes cut a size one after the other.

    They cut as torch.chunk does: all parts have the size of the first, but for the last ones.

    >>> from autopar.ir import Mesh
    >>> parts_of(5, (0,), Mesh.parse("tp=3"))
    (Share(0, 2, 4), Share(2, 2, 1))
    """
    found = []
    for rank in range(mesh.size):
        position, first, rest = mesh.coordinates(rank), 0, size
        for axis in axes:
            width = -(-rest // mesh.sizes[axis])
            before = min(position[axis] * width, rest)
            first, rest = first + before, min(width, rest - before)
        found.append((first, rest))
    starts, sizes = zip(*found, strict=True)
    return Share.of(starts), Share.of(sizes)


def divides(dims: Dims, layout: Layout, mesh: Mesh) -> bool:
    """Whether a layout cuts a tensor into parts of one size.

    The number of parts must divide the size of every factor that is split, and a dim in S(d.*) must be in no other S.
    """
    for dim, sizes in enumerate(dims):
        chunked = [state for state in layout if state.splits_as(S(dim, WHOLE))]
        touched = [state for state in layout if state.kind == "S" and state.dim == dim]
        if chunked and len(touched) > len(chunked):
            return False
        if math.prod(sizes) % split_count(layout, mesh, dim, WHOLE):
            return False
        if any(size % split_count(layout, mesh, dim, i) for i, size in enumerate(sizes)):
            return False
    return True


def lies_in_chunks(dims: Dims, layout: Layout, mesh: Mesh) -> bool:
    """Whether each rank's part of every dim is one run of neighbouring entries, as with DTensor's `Shard(dim)`.

    S(d) and S(d.*) always give such runs. S(d.f) of an inner factor f does only where earlier axes split every factor
    before f into parts of size 1. Example: a dim of 4 key-value heads with 2 query heads each. On the mesh tp=4,tq=2,
    S(0)@tp S(0.1)@tq gives each rank one of the eight heads, the same one as two nested `Shard(0)`.

    >>> from autopar.ir import Mesh
    >>> lies_in_chunks(((4, 2, 16),), (S(0), S(0, 1)), Mesh.parse("tp=4,tq=2"))
    True
    >>> lies_in_chunks(((4, 2, 16),), (S(0), S(0, 1)), Mesh.parse("tp=2,tq=2"))
    False
    """
    if any(state.depth for state in layout):
        return False  # DTensor nests its shards in the order of the mesh
    for axis, state in enumerate(layout):
        earlier = (*layout[:axis], *(R for _ in layout[axis:]))
        before = range(state.factor) if state.kind == "S" else ()
        if any(split_count(earlier, mesh, state.dim, each) != dims[state.dim][each] for each in before):
            return False
    return True


def shape_of(dims: Dims) -> tuple[int, ...]:
    """Shape of a tensor whose dims have these factors.

    >>> shape_of(((2, 3), (5,)))
    (6, 5)
    """
    return tuple(math.prod(sizes) for sizes in dims)


def local_shape(dims: Dims, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the part of a tensor that a rank holds, with a `Share` where ranks have parts of different sizes.

    Args:
        dims: for every dim of the tensor, the sizes of the factors whose product is the size of the dim: `(8,)`
            for a dim of 8, `(32, 128)` for a dim of 4096 that the model views as 32 heads of 128.
        layout: state of the whole tensor along every axis of the mesh, in the order of the axes.
        mesh: the mesh that the tensor lies on.

    >>> from autopar.ir import Mesh
    >>> local_shape(((8,), (6,)), (S(0), S(1)), Mesh.parse("dp=4,tp=2"))
    (2, 3)
    >>> local_shape(((32,), (6,)), (S(0),), Mesh.parse("dp=3"))
    (Share(11, 11, 10), 6)
    """
    return shape_of(local_factors(dims, layout, mesh))


def local_elements(dims: Dims, layout: Layout, mesh: Mesh) -> int:
    """Number of elements of a tensor that a rank holds, of those that hold a largest part.

    >>> from autopar.ir import Mesh
    >>> local_elements(((8,), (6,)), (S(0), S(1)), Mesh.parse("dp=4,tp=2"))
    6
    """
    count = int(math.prod(local_shape(dims, layout, mesh)))
    stretch = stretch_of(layout)
    return count if stretch == 1 else math.ceil(stretch * count)


def stretch_of(layout: Layout) -> float:
    """Elements of the fullest rank over those of the mean, in rows that ranks exchanged along one axis or several."""
    return max((state.stretch for state in layout), default=1.0)
