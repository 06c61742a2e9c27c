"""The steps of a conversion as calls of collectives on the local tensor of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.ir.conversion import BY_ROWS, LayoutStep, steps_of
from autopar.ir.layout import WHOLE, Dims, Layout, State, local_elements, local_factors, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.share import on

FIT = "fit"


@dataclass(frozen=True)
class CollectiveCall:
    """A step as a call of a collective on the local tensor, or a `fit`, which sends nothing.

    Attributes:
        name, backward: names of the collective and of its transpose, as in `TRANSITIONS`; or `fit`, see
            [Note: uneven parts] in autopar/ir/uneven.py.
        dims: dims of the local tensor, viewed as `before`, on which the collective works: first the split dim of the
            source state, then that of the target state. For a state O the list has the owner's position along the axis
            instead: (owner,) for a broadcast, (owner, dim) for a scatter, (dim, owner) for a gather, (owner, next
            owner) for a send.
        axis: position of the mesh axis; -1 of a `fit`.
        before: shape as which the local tensor is viewed before the call, so that an inner factor is a dim by itself;
            None where no view is needed.
        after: shape in which the result is viewed; None where no view is needed.
        fits: shape that a `fit` gives the viewed tensor; () of a collective.
    """

    name: str
    backward: str
    dims: tuple[int, ...]
    axis: int
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None
    fits: tuple[int, ...] = ()

    def is_same_forward(self, other: CollectiveCall) -> bool:
        """Whether two calls differ in nothing but their transposes, as those of S -> R and S -> V do."""
        return replace(self, backward=other.backward) == other

    def on(self, rank: int) -> CollectiveCall:
        """The same call with the shapes of one rank."""
        before, after = (shape and on(shape, rank) for shape in (self.before, self.after))
        return replace(self, before=before, after=after, fits=on(self.fits, rank))

    @property
    def back_by_rows(self) -> CollectiveCall:
        """The same call, whose transpose carries the gradient by rows where it can; see [Note: by rows]."""
        return replace(self, backward=BY_ROWS.get(self.backward, self.backward))


def calls(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> tuple[CollectiveCall, ...]:
    """The calls of collectives that convert a tensor from one layout to another; an axis of one rank needs none."""
    return tuple(call for _, call, _ in calls_between(dims, source, target, mesh))


def calls_between(
    dims: Dims, source: Layout, target: Layout, mesh: Mesh
) -> Iterator[tuple[Layout, CollectiveCall, Layout]]:
    """Yields the calls that convert a tensor, each with the layouts before and after it."""
    layout = source
    for step in steps_of(dims, source, target, mesh):
        after = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
        if mesh.sizes[step.axis] > 1:
            yield from _fitted(_call(dims, step, layout, after, mesh), dims, step, layout, after, mesh)
        layout = after


def _fitted(
    call: CollectiveCall, dims: Dims, step: LayoutStep, before: Layout, after: Layout, mesh: Mesh
) -> Iterator[tuple[Layout, CollectiveCall, Layout]]:
    """A call, between fits where ranks have parts of different sizes along its axis; see [Note: uneven parts]."""
    views = call.before is not None
    given, made = (
        _viewed(dims, layout, mesh) if views else local_shape(dims, layout, mesh) for layout in (before, after)
    )
    taken, left, size = [*given], [*made], mesh.sizes[step.axis]
    if step.over < 0 and step.source.kind == "S":
        gathered = call.dims[0]
        taken[gathered] = _largest(dims, step.source, after, mesh, size, views=views)
        left[gathered] = taken[gathered] * size
    if step.over < 0 and step.target.kind == "S":
        cut = call.dims[-1]
        left[cut] = _largest(dims, step.target, before, mesh, size, views=views)
        taken[cut] = left[cut] * size
    pads, cuts = tuple(taken) != given, tuple(left) != made
    if pads:
        yield before, CollectiveCall(FIT, FIT, (), -1, before=call.before, fits=tuple(taken)), before
    yield before, replace(call, before=None if pads else call.before, after=None if cuts else call.after), after
    if cuts:
        yield after, CollectiveCall(FIT, FIT, (), -1, after=call.after, fits=made), after


def _largest(dims: Dims, state: State, layout: Layout, mesh: Mesh, ranks: int, *, views: bool) -> int:
    """The largest part of a dim of a rank's tensor, if so many ranks cut it as a state says.

    Args:
        layout: the layout in which what they cut is whole.
        views: whether every factor is a dim by itself.
    """
    factors = local_factors(dims, layout, mesh)[state.dim] or (1,)
    whole = math.prod(factors) if state.factor == WHOLE else factors[state.factor]
    inner = () if views or state.factor == WHOLE else factors[1:]
    return -(-whole // ranks) * math.prod(inner)


def _viewed(dims: Dims, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a rank's part in which every factor is a dim by itself; a dim without factors stays one of 1."""
    return tuple(size for sizes in local_factors(dims, layout, mesh) for size in sizes or (1,))


def _call(dims: Dims, step: LayoutStep, before: Layout, after: Layout, mesh: Mesh) -> CollectiveCall:
    placed = [state for state in (step.source, step.target) if state.kind in "SO"]
    splits = [state for state in placed if state.kind == "S"]
    name, backward = step.transition
    if step.over >= 0:
        return _reordering(dims, step, before, mesh)
    if all(state.factor in (0, WHOLE) for state in splits) and len({s.dim for s in splits}) == len(splits):
        dims_or_owners = tuple(s.dim if s.kind == "S" else s.owner for s in placed)
        return CollectiveCall(name, backward, dims_or_owners, step.axis)
    # A dim without factors (of size 1) keeps its place as a factor of 1.
    factors = [sizes or (1,) for sizes in local_factors(dims, before, mesh)]
    positions = [s.owner if s.kind == "O" else sum(len(f) for f in factors[: s.dim]) + max(s.factor, 0) for s in placed]
    viewed = _viewed(dims, before, mesh)
    return CollectiveCall(
        name, backward, tuple(positions), step.axis, before=viewed, after=local_shape(dims, after, mesh)
    )


def _reordering(dims: Dims, step: LayoutStep, layout: Layout, mesh: Mesh) -> CollectiveCall:
    """The all-to-all along the minor axis in which the parts of a factor change their order.

    A rank that has one piece of each of the A parts, (A, n), cuts the A, and gets (A / T, T n), a run of its own.
    """
    factors = [sizes or (1,) for sizes in local_factors(dims, layout, mesh)]
    at = sum(len(f) for f in factors[: step.source.dim]) + max(step.source.factor, 0)
    flat = [size for sizes in factors for size in sizes]
    parts = mesh.sizes[step.over] // (mesh.sizes[step.axis] if step.enters else 1)
    viewed = (*flat[:at], parts, flat[at] // parts, *flat[at + 1 :])
    name, backward = step.transition
    positions = (at, at + 1) if step.enters else (at + 1, at)
    return CollectiveCall(name, backward, positions, step.axis, before=viewed, after=local_shape(dims, layout, mesh))


def walk(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> Iterator[tuple[LayoutStep, int, int]]:
    """Yields every step with the number of elements that a rank holds before it and after it."""
    layout = list(source)
    before = local_elements(dims, source, mesh)
    for step in steps_of(dims, source, target, mesh):
        layout[step.axis] = step.target
        after = local_elements(dims, tuple(layout), mesh)
        yield step, before, after
        before = after
