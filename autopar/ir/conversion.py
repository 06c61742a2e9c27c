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

[Note: nested splits] When the axes a and t split the same factor and a is the major one, the rank at position i of a
and j of t holds the j-th part of the i-th part. While t splits the factor, a can neither start nor stop splitting it:
each rank would hold pieces of several parts. `steps` therefore converts t before a where t must change anyway.
Otherwise there are three ways, of which `steps_of` takes the first one that divides. (Where axes nest in another order
than that of the mesh, the first is left out.)

    reorder    a leaves, and each rank of t has a piece of every part of a; an all-to-all along t makes them one run
    park       t splits another factor meanwhile: an all-to-all along t, the step along a, and an all-to-all back
    un-nest    gather along t, convert along a, and split along t again

Let A and T be the sizes of the axes. In a reordering each rank of t cuts its A pieces among the T ranks of t, so that T
must divide A. To start splitting along a is the transpose: the all-to-all along t comes first. A rank that holds L
numbers receives (A - 1) L + A L (T - 1) / T to leave a by an all-gather, where un-nesting takes
(A T - 1) L.

[Note: by rows] A `reduce` or a `send` carries a tensor to its owner. It may be carried whole, or *by rows*: each rank
sends the rows (along dim 0) that are not all zero, with their indices, and the owner adds them to its own part, or to
zeros. Both give the same tensor, whatever it holds. Rows are cheaper where few of them are not zero, as in the gradient
of a table of embeddings: with k such rows of r bytes each, a message has k (r + 8) + 8 bytes, 8 for each index and 8
for k itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import LayoutError
from autopar.ir.layout import WHOLE, Dims, Layout, R, S, State, axes_along, format_layout, in_nesting_order, nested
from autopar.ir.mesh import Mesh
from autopar.ir.uneven import uneven_axes
from autopar.ir.vacancy import can_step


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

# The same collectives by rows, see [Note: by rows].
BY_ROWS: Mapping[str, str] = MappingProxyType({"reduce": "reduce_rows", "send": "send_rows"})

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


_MOST_STEPS = 6  # for each axis; at most three were ever needed

Sizes = tuple[int, ...]  # number of ranks along every axis of a mesh


@dataclass(frozen=True)
class LayoutStep:
    """One change along one mesh axis.

    Attributes:
        axis: position of the axis in the mesh.
        source, target: states before and after; equal where the parts of a factor only change their order.
        over: axis that has left the factor, or is to enter it, in a step that changes the order; -1 in other steps.
        enters: whether `over` is to enter the factor.
    """

    axis: int
    source: State
    target: State
    over: int = -1
    enters: bool = False

    @property
    def transition(self) -> Transition:
        return TRANSITIONS[self.source.kind + self.target.kind]


@functools.cache
def steps(source: Layout, target: Layout) -> tuple[LayoutStep, ...]:
    """The steps from one layout to another of a tensor of unknown dims; none for equal layouts.

    They are in the order of [Note: nested splits], and un-nest where an axis cannot move else.

    >>> from autopar.ir import P, R, S
    >>> [(str(step.source), str(step.target)) for step in steps((P, R), (S(0), R))]
    [('P', 'S(0)')]
    """
    return _path(source, target, (), ())


def steps_of(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> tuple[LayoutStep, ...]:
    """The steps that convert a tensor of these dims, in the order of [Note: nested splits].

    On a mesh with vacant places it is the first order of the steps that the ranks can take. Raises LayoutError where
    there is none.
    """
    # The steps of most conversions are the same for all dims and sizes. Parts of different sizes are not reordered.
    is_known = _unnests(source, target) and not (uneven_axes(dims, source, mesh) or uneven_axes(dims, target, mesh))
    known = (dims, mesh.sizes) if is_known else ((), ())
    found = _path(source, target, *known)
    return found if mesh.occupied is None else _among_present(found, source, target, mesh)


@functools.cache
def _among_present(usual: tuple[LayoutStep, ...], source: Layout, target: Layout, mesh: Mesh) -> tuple[LayoutStep, ...]:
    """The usual steps if the ranks of a mesh with vacant places can take them, else the same in another order."""
    layout = source
    for step in usual:
        if not can_step(mesh, layout, step.axis, step.target):
            break
        layout = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
    else:
        return usual
    found = _order_of_present(source, target, mesh)
    if found is None:
        raise LayoutError(
            f"A tensor in {format_layout(source, mesh)} cannot be converted to {format_layout(target, mesh)} on the "
            f"mesh {mesh}, which has {mesh.ranks} ranks for {mesh.size} places: a step of the conversion needs a rank "
            "at a vacant place. Leave the ops that use the tensor to ranks in rows without vacant places, as the "
            "recipe serve does, or give the mesh a rank at every place."
        )
    return found


def _order_of_present(source: Layout, target: Layout, mesh: Mesh) -> tuple[LayoutStep, ...] | None:
    """The first order of one step along each axis that the ranks of a mesh can take; None if there is none."""
    current, goal = list(source), list(target)
    if current == goal:
        return ()
    legal = [step for step in _pending(current, goal) if _is_legal(step, current, goal)]
    for step in sorted(legal, key=lambda each: _ORDER.index(each.transition.forward)):
        if can_step(mesh, source, step.axis, step.target):
            after = (*source[: step.axis], step.target, *source[step.axis + 1 :])
            rest = _order_of_present(after, target, mesh)
            if rest is not None:
                return (step, *rest)
    return None


def can_go_by_rows(dims: Dims, storage: Layout, resident: Layout, mesh: Mesh) -> bool:
    """Whether a gradient's way from its resident to its storage layout has a step that rows can be sent in.

    >>> from autopar.ir import Mesh, O, R, V
    >>> can_go_by_rows(((8,),), (O(0),), (V,), Mesh.parse("dp=2"))
    True
    """
    found = steps_of(dims, storage, resident, mesh)
    return any(step.transition.backward in BY_ROWS for step in found)


@functools.cache
def _unnests(source: Layout, target: Layout) -> bool:
    """Whether `steps` gathers a tensor along an axis and splits it along the same axis again."""
    axes = [step.axis for step in steps(source, target)]
    return len(set(axes)) < len(axes)


@functools.cache
def _path(source: Layout, target: Layout, dims: Dims, sizes: Sizes) -> tuple[LayoutStep, ...]:
    current, goal = list(source), list(target)
    result: list[LayoutStep] = []
    while current != goal:
        assert len(result) < _MOST_STEPS * len(goal), f"the steps from {source} to {target} do not end"
        step = _next_legal(current, goal)
        found = [step] if step else _reordered(current, goal, sizes)
        for each in found or [_parked(current, goal, dims, sizes) or _unnest(current, goal)]:
            result.append(each)
            order = in_nesting_order(current)
            current[each.axis] = each.target
            current = list(_renested(current, each, order))
    return tuple(result)


def _renested(current: list[State], step: LayoutStep, order: list[int]) -> Sequence[State]:
    """The states after a step, with the least depths: an axis that has left a factor makes others less deep."""
    if not any(state.depth for state in current):
        return current
    return nested(current, [*(axis for axis in order if axis != step.axis), step.axis])


def _reordered(current: list[State], goal: list[State], sizes: Sizes) -> list[LayoutStep]:
    """A step along an axis under which later axes are nested, with the steps that reorder them; [] if none divides.

    Of several steps those come last that an earlier axis would cross by entering the same factor.
    """
    pending = _pending(current, goal)
    found = [step for step in pending if sizes and _can_reorder(step, current, goal, sizes)]
    step = min(found, key=lambda each: bool(_awaited(each, current, goal)), default=None)
    if step is None:
        return []
    before = reversed(_under(step.axis, step.target, current, sizes))
    after = _under(step.axis, step.source, current, sizes)
    return [
        *(LayoutStep(t, step.target, step.target, step.axis, enters=True) for t in before),
        step,
        *(LayoutStep(t, step.source, step.source, step.axis) for t in after),
    ]


def _can_reorder(step: LayoutStep, current: list[State], goal: list[State], sizes: Sizes) -> bool:
    """Whether the axes under a step's axis divide it, and nothing is in the way in the factor that it enters.

    Not where axes nest in another order than that of the mesh, nor where a more major axis is still to enter the same
    factor and could not cross the others then: they would have to leave again.
    """
    axis, target = step.axis, step.target
    if any(state.depth for state in (*current, *goal)):
        return False
    under = _under(axis, step.source, current, sizes) + _under(axis, target, current, sizes)
    if target.kind == "S":
        others = [(s, g) for a, (s, g) in enumerate(zip(current, goal, strict=True)) if a != axis]
        if any(_chunk_meets_factor(s, target) or s == target != g for s, g in others):
            return False
        for a in _awaited(step, current, goal):
            crossed = _under(a, current[a], current, sizes) + _under(a, target, current, sizes)
            if any(sizes[a] % sizes[t] for t in (axis, *crossed)):
                return False
    return all(sizes[axis] % sizes[t] == 0 for t in under)


def _under(axis: int, state: State, current: list[State], sizes: Sizes) -> list[int]:
    """The later axes of several ranks that split what an axis splits in this state, the major one first."""
    if state.kind != "S" or sizes[axis] == 1:
        return []
    later = range(axis + 1, len(current))
    return [t for t in later if current[t] == state and sizes[t] > 1]


def _awaited(step: LayoutStep, current: Sequence[State], goal: Sequence[State]) -> list[int]:
    """The more major axes that are still to enter the factor that a step's axis enters."""
    target = step.target
    if target.kind != "S":
        return []
    return [a for a in _above(step.axis, target, goal) if not current[a].splits_as(target)]


def _above(axis: int, state: State, layout: Sequence[State]) -> list[int]:
    """The axes that split the factor of `state` and are more major than an axis, which splits it too."""
    along = axes_along(layout, state)
    return along[: along.index(axis)]


def _parked(current: list[State], goal: list[State], dims: Dims, sizes: Sizes) -> LayoutStep | None:
    """The all-to-all in place of the all-gather that un-nests, to a factor that no axis splits before or after."""
    step = _unnest(current, goal)
    if not _blocks(step.axis, current, goal):
        return None
    for dim, factors in enumerate(dims):
        for factor, size in enumerate(factors):
            free = S(dim, factor)
            touched = any(s.kind == "S" and _overlap(s, free) for s in (*current, *goal))
            if not touched and size % sizes[step.axis] == 0:
                return LayoutStep(step.axis, step.source, free)
    return None


def _blocks(axis: int, current: list[State], goal: list[State]) -> bool:
    """Whether an axis splits a factor that a more major axis is to enter or leave."""
    state = current[axis]
    if state.kind != "S":
        return False
    above = _above(axis, state, current)
    if goal[axis].splits_as(state):
        return above != _above(axis, state, goal)
    entering = (a for a in range(axis) if goal[a].splits_as(state))
    return any(not goal[a].splits_as(state) for a in above) or any(not current[a].splits_as(state) for a in entering)


def _overlap(a: State, b: State) -> bool:
    """Whether two splits are of one factor, or one is S(d.*) of the dim that the other splits."""
    return a.splits_as(b) or _chunk_meets_factor(a, b)


def _pending(current: list[State], goal: list[State]) -> list[LayoutStep]:
    """The steps of the axes that are to change."""
    states = enumerate(zip(current, goal, strict=True))
    return [_detour(LayoutStep(a, s, g)) for a, (s, g) in states if s != g and not s.splits_as(g)]


def _next_legal(current: list[State], goal: list[State]) -> LayoutStep | None:
    legal = [step for step in _pending(current, goal) if _is_legal(step, current, goal)]
    return min(legal, key=lambda step: _ORDER.index(step.transition.forward), default=None)


def _detour(step: LayoutStep) -> LayoutStep:
    """The step S -> R in place of a step from S to S of which one is S(d.*).

    A chunk of S(d.*) does not follow the factors of its dim, so that no all-to-all leads to another split.
    """
    if step.source.kind == step.target.kind == "S" and WHOLE in (step.source.factor, step.target.factor):
        return LayoutStep(step.axis, step.source, R)
    return step


def _is_legal(step: LayoutStep, current: list[State], goal: list[State]) -> bool:
    source, target = step.source, step.target
    if source.kind == "S" and axes_along(current, source)[-1] != step.axis:
        return False
    if target.kind != "S":
        return True
    if any(_chunk_meets_factor(state, target) for state in current):
        return False
    return axes_along(current, target) == _above(step.axis, target, goal)


def _chunk_meets_factor(a: State, b: State) -> bool:
    """Whether one state is S(d.*), and the other splits a factor of the same dim d."""
    return a.kind == b.kind == "S" and a.dim == b.dim and (a.factor == WHOLE) != (b.factor == WHOLE)


def _unnest(current: list[State], goal: list[State]) -> LayoutStep:
    """The all-gather along the last axis whose split keeps a more major axis from changing."""
    minor = [
        axis
        for axis, state in reversed([*enumerate(current)])
        if state.kind == "S" and axes_along(current, state)[-1] == axis
    ]
    blocking = [axis for axis in minor if _blocks(axis, current, goal)]
    leaving = [axis for axis in minor if current[axis] != goal[axis]]
    assert blocking or leaving, f"no legal step from {current} to {goal}"
    axis = (blocking or leaving)[0]
    return LayoutStep(axis, current[axis], R)
