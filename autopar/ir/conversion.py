"""Conversions: the steps that turn one layout into another, and their transposes.

Each step changes the state along one mesh axis, and has the transposed step as its backward:

    R -> V      nothing            all-reduce       P -> V      all-reduce      all-reduce
    P -> R      all-reduce         nothing          R -> P      keep 1/n        nothing
    S -> V      all-gather         reduce-scatter   V -> R      nothing         keep 1/n
    P -> S      reduce-scatter     all-gather       S -> P      zero-pad        local slice
    S -> R      all-gather         local slice      V -> P      keep 1/n        keep 1/n
    R -> S      local slice        all-gather
    V -> S      local slice        zero-pad
    S -> S'     all-to-all         all-to-all
    O -> R      broadcast          keep                 R -> O      keep        broadcast
    O -> V      broadcast          reduce               P -> O      reduce      broadcast
    O -> S      scatter            gather               S -> O      gather      scatter
    O -> P      fill               keep                 V -> O      keep        fill
    O(i) -> O(j)  send             send

The owner keeps its copy and the others let go of theirs (`keep`); the others make zeros (`fill`).

[Note: nested splits] When axes a < t split the same factor, a is the major one: rank (i, j) holds the
j-th part of the i-th part. While t holds its part, a can neither leave the factor nor arrive at it,
because the parts would interleave. `steps` therefore moves the minor axis first where it must move
anyway, and otherwise un-nests it (gather), moves the major one, and splits again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir.layout import (
    WHOLE,
    Dims,
    Layout,
    R,
    State,
    local_elements,
    local_factors,
    local_shape,
)
from autopar.ir.mesh import Mesh


class Transition(NamedTuple):
    """The collectives that a step runs in forward and in backward."""

    forward: str
    backward: str


TRANSITIONS = {
    "RV": Transition("vary", "all_reduce"),
    "PR": Transition("all_reduce", "vary"),
    "SV": Transition("all_gather", "reduce_scatter"),
    "PS": Transition("reduce_scatter", "all_gather"),
    "SR": Transition("all_gather", "shard"),
    "RS": Transition("shard", "all_gather"),
    "VS": Transition("shard", "pad"),
    "SS": Transition("all_to_all", "all_to_all"),
    "PV": Transition("all_reduce", "all_reduce"),
    "RP": Transition("partial", "vary"),
    "VR": Transition("vary", "partial"),
    "SP": Transition("pad", "shard"),
    "VP": Transition("partial", "partial"),
    "OR": Transition("broadcast", "keep"),
    "RO": Transition("keep", "broadcast"),
    "OV": Transition("broadcast", "reduce"),
    "PO": Transition("reduce", "broadcast"),
    "OS": Transition("scatter", "gather"),
    "SO": Transition("gather", "scatter"),
    "OP": Transition("fill", "keep"),
    "VO": Transition("keep", "fill"),
    "OO": Transition("send", "send"),
}

# Steps that shrink the tensor come first and steps that grow it last, so that the others move little.
_ORDER = (
    "keep",
    "shard",
    "scatter",
    "reduce_scatter",
    "reduce",
    "vary",
    "partial",
    "send",
    "all_to_all",
    "all_reduce",
    "broadcast",
    "fill",
    "all_gather",
    "gather",
    "pad",
)


@dataclass(frozen=True)
class LayoutStep:
    """One change of state along one mesh axis; `axis` is the axis' position in the mesh."""

    axis: int
    source: State
    target: State

    @property
    def transition(self) -> Transition:
        return TRANSITIONS[self.source.kind + self.target.kind]


@functools.cache
def steps(source: Layout, target: Layout) -> tuple[LayoutStep, ...]:
    """The steps from one layout to another, in an order that respects nesting.

    See [Note: nested splits]. The same layouts give no steps.
    """
    current = list(source)
    goal = list(target)
    result: list[LayoutStep] = []
    while current != goal:
        step = _next_legal(current, goal) or _unnest(current, goal)
        result.append(step)
        current[step.axis] = step.target
    return tuple(result)


def _next_legal(current: list[State], goal: list[State]) -> LayoutStep | None:
    pending = [
        LayoutStep(a, s, g) for a, (s, g) in enumerate(zip(current, goal, strict=True)) if s != g
    ]
    pending = [_detour(step) for step in pending]
    legal = [step for step in pending if _is_legal(step, current, goal)]
    return min(legal, key=lambda step: _ORDER.index(step.transition.forward), default=None)


def _detour(step: LayoutStep) -> LayoutStep:
    """A chunk S(d.*) has no factor structure: it is gathered before anything else is done with it."""
    if step.source.kind == step.target.kind == "S" and WHOLE in (
        step.source.factor,
        step.target.factor,
    ):
        return LayoutStep(step.axis, step.source, R)
    return step


def _is_legal(step: LayoutStep, current: list[State], goal: list[State]) -> bool:
    later = range(step.axis + 1, len(current))
    if step.source.kind == "S" and any(current[t] == step.source for t in later):
        return False
    if step.target.kind != "S":
        return True
    if any(_chunk_meets_factor(state, step.target) for state in current):
        return False
    waiting = any(goal[a] == step.target != current[a] for a in range(step.axis))
    leaving = any(current[a] == step.target != goal[a] for a in range(step.axis))
    return not (waiting or leaving or any(current[t] == step.target for t in later))


def _chunk_meets_factor(a: State, b: State) -> bool:
    """Whether one state chunks a dim of which the other splits a factor."""
    return a.kind == b.kind == "S" and a.dim == b.dim and (a.factor == WHOLE) != (b.factor == WHOLE)


def _unnest(current: list[State], goal: list[State]) -> LayoutStep:
    """Gathers the most minor axis that stands in the way of a pending step."""
    for axis in reversed(range(len(current))):
        state = current[axis]
        blocks = any(current[a] != goal[a] and state in (current[a], goal[a]) for a in range(axis))
        if state.kind == "S" and blocks:
            return LayoutStep(axis, state, R)
    for axis in reversed(range(len(current))):
        if current[axis].kind == "S" and current[axis] != goal[axis]:
            return LayoutStep(axis, current[axis], R)
    raise AssertionError(f"no legal step from {current} to {goal}")


@dataclass(frozen=True)
class CollectiveCall:
    """A step as a call on the local tensor.

    Attributes:
        name, backward: the op and its transpose, of `TRANSITIONS`.
        dims: the dims of the (reshaped) local tensor it works on, in the order of the states that it leads from
            and to. In place of a state O stands the position of the owner along the axis: (owner,) of a broadcast,
            (owner, dim) of a scatter, (dim, owner) of a gather, (owner, next owner) of a send.
        axis: position of the mesh axis.
        before: the shape the local tensor is viewed in first, so that a minor factor is a dim of its
            own; None where no view is needed.
        after: the shape of the local tensor in its new layout, where a view was needed.
    """

    name: str
    backward: str
    dims: tuple[int, ...]
    axis: int
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None


def calls(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> tuple[CollectiveCall, ...]:
    """The steps from one layout of a tensor to another, as calls; an axis of one rank needs none."""
    result = []
    layout = source
    for step in steps(source, target):
        after = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
        if mesh.sizes[step.axis] > 1:
            result.append(_call(dims, step, layout, after, mesh))
        layout = after
    return tuple(result)


def _call(
    dims: Dims, step: LayoutStep, before: Layout, after: Layout, mesh: Mesh
) -> CollectiveCall:
    placed = [state for state in (step.source, step.target) if state.kind in "SO"]
    splits = [state for state in placed if state.kind == "S"]
    name, backward = step.transition
    if all(state.factor in (0, WHOLE) for state in splits) and len({s.dim for s in splits}) == len(
        splits
    ):
        dims_or_owners = tuple(s.dim if s.kind == "S" else s.owner for s in placed)
        return CollectiveCall(name, backward, dims_or_owners, step.axis)
    # A dim without factors (of size 1) keeps its place as a factor of 1.
    factors = [sizes or (1,) for sizes in local_factors(dims, before, mesh)]
    positions = [
        s.owner if s.kind == "O" else sum(len(f) for f in factors[: s.dim]) + max(s.factor, 0)
        for s in placed
    ]
    return CollectiveCall(
        name, backward, tuple(positions), step.axis,
        before=tuple(size for sizes in factors for size in sizes),
        after=local_shape(dims, after, mesh),
    )  # fmt: skip


def walk(
    dims: Dims, source: Layout, target: Layout, mesh: Mesh
) -> Iterator[tuple[LayoutStep, int, int]]:
    """Yields every step with the elements that a rank holds before and after it."""
    layout = list(source)
    before = local_elements(dims, source, mesh)
    for step in steps(source, target):
        layout[step.axis] = step.target
        after = local_elements(dims, tuple(layout), mesh)
        yield step, before, after
        before = after
