"""Conversions: the steps that turn one layout into another, and their transposes.

Each step changes the state along one mesh axis. Its backward is the transposed step. The two columns after each step
name what the ranks of the axis run in forward and in backward:

    R -> V      nothing            all-reduce       P -> V      all-reduce      all-reduce
    P -> R      all-reduce         nothing          R -> P      first           nothing
    S -> V      all-gather         reduce-scatter   V -> R      nothing         first
    P -> S      reduce-scatter     all-gather       S -> P      zero-pad        local slice
    S -> R      all-gather         local slice      V -> P      first           first
    R -> S      local slice        all-gather
    V -> S      local slice        zero-pad
    S -> S'     all-to-all         all-to-all
    O -> R      broadcast          keep                 R -> O      keep        broadcast
    O -> V      broadcast          reduce               P -> O      reduce      broadcast
    O -> S      scatter            gather               S -> O      gather      scatter
    O -> P      fill               keep                 V -> O      keep        fill
    O(i) -> O(j)  send             send

`first`: the first rank of the axis keeps its values, and the others get zeros, so that the sum is right.
`keep`: the owner keeps its copy, and the others drop theirs. `fill`: the owner keeps its copy, and the others get
zeros.

[Note: nested splits] When the axes a < t split the same factor, a is the major one: the rank at position i of a and j
of t holds the j-th part of the i-th part. While t splits the factor, a can neither start nor stop splitting it: each
rank would hold pieces of several parts. `steps` therefore converts t before a where t must change anyway. Otherwise
it gathers along t, converts along a, and splits along t again.
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

# The collectives of steps from or to a state O.
OWNER_COLLECTIVES = frozenset(found.forward for pair, found in TRANSITIONS.items() if "O" in pair)

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
    """The steps from one layout to another, in the order of [Note: nested splits]; none for equal layouts.

    >>> from autopar.ir import P, R, S
    >>> [(str(step.source), str(step.target)) for step in steps((P, R), (S(0), R))]
    [('P', 'S(0)')]
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
    """The step S -> R in place of a step from S to S of which one is S(d.*).

    A chunk of S(d.*) does not follow the factors of its dim, so that no all-to-all leads to another split.
    """
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
    """Whether one state is S(d.*), and the other splits a factor of the same dim d."""
    return a.kind == b.kind == "S" and a.dim == b.dim and (a.factor == WHOLE) != (b.factor == WHOLE)


def _unnest(current: list[State], goal: list[State]) -> LayoutStep:
    """The all-gather along the last axis whose split keeps an earlier axis from changing."""
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
    """A step as a call of a collective on the local tensor.

    Attributes:
        name, backward: names of the collective and of its transpose, as in `TRANSITIONS`.
        dims: dims of the local tensor, viewed as `before`, on which the collective works: first the split dim of the
            source state, then that of the target state. For a state O the list has the owner's position along the axis
            instead: (owner,) for a broadcast, (owner, dim) for a scatter, (dim, owner) for a gather, (owner, next
            owner) for a send.
        axis: position of the mesh axis.
        before: shape as which the local tensor is viewed before the call, so that an inner factor is a dim by itself;
            None where no view is needed.
        after: shape of the local tensor in its new layout; None where no view is needed.
    """

    name: str
    backward: str
    dims: tuple[int, ...]
    axis: int
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None


def calls(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> tuple[CollectiveCall, ...]:
    """The calls of collectives that convert a tensor from one layout to another; an axis of one rank needs none."""
    return tuple(call for _, call, _ in calls_between(dims, source, target, mesh))


def calls_between(
    dims: Dims, source: Layout, target: Layout, mesh: Mesh
) -> Iterator[tuple[Layout, CollectiveCall, Layout]]:
    """Yields the calls that convert a tensor, each with the layouts before and after it."""
    layout = source
    for step in steps(source, target):
        after = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
        if mesh.sizes[step.axis] > 1:
            yield layout, _call(dims, step, layout, after, mesh), after
        layout = after


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
    """Yields every step with the number of elements that a rank holds before it and after it."""
    layout = list(source)
    before = local_elements(dims, source, mesh)
    for step in steps(source, target):
        layout[step.axis] = step.target
        after = local_elements(dims, tuple(layout), mesh)
        yield step, before, after
        before = after
