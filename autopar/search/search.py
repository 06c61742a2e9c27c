"""The search for a plan: one mesh axis at a time, from several starts, until nothing changes.

The program of one axis (`autopar.search.milp`) is exact given the other axes. `search` solves it
axis by axis until no axis can be improved. Descents begin

- with every axis unsplit, in every order of the axes, memory relaxed by what the axes still to
  come can divide;
- if several axes are free, with what is found when the first of them must split the batch and the
  others what Megatron splits, for every number of first ones.

From the best of these the plan is expanded to the whole graph, priced again node by node
(`autopar.cost_model.price`), and must cost what the solver said.

One axis is solved to a proven optimum (to 0.01 % where memory binds). Over several axes the result
is a local optimum: no single axis can be improved while the others stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_model import Cost, Hardware, price
from autopar.errors import MeshError, SearchError
from autopar.ir import PIPELINE_AXIS, UNSPLIT, Graph, Layout, Mesh, ParameterPlan, Plan
from autopar.search.checks import check_axes, check_used
from autopar.search.milp import Assignment, AxisProgram, Outcome
from autopar.search.notes import explain
from autopar.search.pins import Pins, resolve_pins
from autopar.search.problem import Problem
from autopar.search.recipes import RECIPES, RecipeLike, format_recipe, recipe_axes, resolve
from autopar.units import format_bytes

_MAX_ROUNDS = 8  # over all axes; descents seen so far end after two or three
_ANY_BYTES = 10**18  # more than any machine has, where there is no bound
_LEAN = 0.8  # of the memory that the best plan takes: enough to forbid it
_TOLERANCE = 1e-6  # relative, between the solver's price and the plan's


def search(
    graph: Graph,
    mesh: Mesh | Mapping[str, int],
    *,
    hardware: Hardware,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    fingerprint: str = "",
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """Finds the fastest plan for `graph` on `mesh` that fits into memory.

    Args:
        graph: the captured model, at the size of one micro-batch.
        hardware: what the prices are made of.
        recipe: constraints, see `autopar.search.recipes`.
        pins: single choices that are fixed, see `autopar.search.pins`.
        memory_bytes: bound on the bytes of a rank; None for no bound.
        micro_batches: how many of them make a step.
        fingerprint: of the captured model, noted in the plan.
        fixed_storage: parameters whose plan is already made, by name.

    Raises RecipeError for a recipe or pin that cannot hold, MeshError for an axis that divides
    nothing, SearchError if no plan fits into memory.
    """
    found = search_with_cost(
        graph, mesh, hardware=hardware, recipe=recipe, pins=pins, memory_bytes=memory_bytes,
        micro_batches=micro_batches, fingerprint=fingerprint, fixed_storage=fixed_storage,
    )  # fmt: skip
    return found.plan


@dataclass(frozen=True)
class Found:
    """A plan with its price and what is known about its optimality.

    Attributes:
        plan: the plan.
        cost: as `autopar.cost_model.price` counts it.
        gap: the largest relative gap that the solver left open along one axis, 0 if proven.
        programs: rows, columns and binaries of the program of every axis, in order.
        descents: seconds of the plan that every start ended in, inf where it did not fit.
        is_tight: whether something faster was found that does not fit.
    """

    plan: Plan
    cost: Cost
    gap: float
    programs: tuple[tuple[int, int, int], ...]
    descents: tuple[float, ...]
    is_tight: bool


def search_with_cost(
    graph: Graph,
    mesh: Mesh | Mapping[str, int],
    *,
    hardware: Hardware,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    fingerprint: str = "",
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
    repeats: bool = True,
) -> Found:
    """`search`, with the figures behind it. With `repeats=False` blocks are not folded."""
    mesh = Mesh.of(mesh)
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(f"The axis name {PIPELINE_AXIS!r} is reserved for pipeline stages.")
    rows = resolve(recipe, mesh)
    check_axes(graph, mesh)
    problem = Problem(
        graph, mesh, rows, hardware=hardware, pins=resolve_pins(pins, graph, mesh),
        micro_batches=micro_batches, fixed_storage=fixed_storage or {}, repeats=repeats,
    )  # fmt: skip
    bound = _ANY_BYTES if memory_bytes is None else memory_bytes
    descents = [_descend(problem, order, bound) for order in _orders(mesh)]
    descents += _from_presets(problem, bound)
    is_tight = any(each.thrifty for each in problem.solved.values())
    best = min(descents, key=lambda d: (max(d.bytes, bound), d.seconds))
    if best.bytes <= bound and len(rows) > 1:
        descents.append(_from_lean(problem, best, bound))
        best = min(descents, key=lambda d: (max(d.bytes, bound), d.seconds))
    if best.bytes > bound:
        raise _does_not_fit(best, bound, mesh, format_recipe(recipe))
    plan = expand(problem, best.assignment, format_recipe(recipe), fingerprint)
    check_used(graph, plan, rows)
    cost = price(graph, plan, hardware)
    _agree(best, cost)
    seconds = tuple(d.seconds if d.bytes <= bound else math.inf for d in descents)
    notes = explain(
        graph, plan, cost, bound_bytes=memory_bytes or hardware.memory_bytes, hardware=hardware,
        descents_seconds=seconds,
    )  # fmt: skip
    return Found(replace(plan, notes=notes), cost, best.gap, best.programs, seconds, is_tight)


def search_mesh(
    graph: Graph,
    world_size: int,
    *,
    hardware: Hardware,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    fingerprint: str = "",
) -> Plan:
    """The best plan over all meshes of at most two axes, named dp and tp, with `world_size` ranks.

    A recipe that names both axes is tried on two axes only. Raises SearchError with every mesh's
    reason if none has a plan.
    """
    found: list[Found] = []
    reasons: list[str] = []
    for mesh in _meshes(world_size, recipe_axes(recipe)):
        try:
            found.append(
                search_with_cost(
                    graph, mesh, hardware=hardware, recipe=recipe, pins=pins,
                    memory_bytes=memory_bytes, micro_batches=micro_batches, fingerprint=fingerprint,
                )
            )  # fmt: skip
        except (MeshError, SearchError) as error:
            reasons.append(f"{mesh}: {error}")
    if not found:
        raise SearchError("\n".join([f"No mesh of {world_size} ranks has a plan.", *reasons]))
    best = min(found, key=lambda each: each.cost.seconds)
    others = [
        f"{each.plan.mesh} {each.cost.seconds * 1e3:.3f} ms" for each in found if each is not best
    ]
    listed = ", ".join(others) or "none"
    note = f"the fastest of the meshes of {world_size} ranks; the others: {listed}"
    return replace(best.plan, notes=(*best.plan.notes, note))


def _meshes(world_size: int, named: Sequence[str]) -> Iterator[Mesh]:
    for major in range(1, world_size + 1):
        minor, rest = divmod(world_size, major)
        if rest == 0 and (len(named) > 1 or 1 < major < world_size):
            yield Mesh((("dp", major), ("tp", minor)))
    if len(named) <= 1:
        yield Mesh(((named[0] if named else "dp", world_size),))


def _orders(mesh: Mesh) -> list[tuple[int, ...]]:
    """Every order of the axes that have more than one rank; the first, slowest, axis leads."""
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1] or [0]
    return list(itertools.permutations(axes))


@dataclass(frozen=True)
class _Descent:
    assignment: Assignment
    seconds: float
    bytes: int
    gap: float
    programs: tuple[tuple[int, int, int], ...]


def _from_presets(problem: Problem, bound: int) -> Iterator[_Descent]:
    """Descents that begin at what people do on several axes: batch first, Megatron last."""
    free = [axis for axis, row in enumerate(problem.recipes) if row.may is None]
    if len(free) < 2 or problem.pins != Pins() or problem.fixed_storage:
        return
    axes = range(len(problem.recipes))
    for batch_axes in range(1, len(free) + 1):
        rows = list(problem.recipes)
        for position, axis in enumerate(free):
            rows[axis] = _PRESETS[position >= batch_axes]
        start = _descend(problem.under(rows), axes, bound)
        yield _descend(problem, axes, bound, start=start.assignment)


def _from_lean(problem: Problem, best: _Descent, bound: int) -> _Descent:
    """A descent from where less memory would have led: room must not make a plan worse."""
    axes = range(len(problem.recipes))
    lean = _descend(problem, axes, int(_LEAN * best.bytes))
    return _descend(problem, axes, bound, start=lean.assignment)


_PRESETS = tuple(
    replace(RECIPES[name], stages=RECIPES["auto"].stages, gathers=True) for name in ("ddp", "tp+sp")
)


def _descend(
    problem: Problem, order: Sequence[int], bound: int, start: Assignment | None = None
) -> _Descent:
    """Solves axis after axis, round after round, until every axis is best given the others.

    Without a `start` the axes to come are unsplit in the first round, and memory is relaxed by
    them.
    """
    assignment = start or _unsplit(problem)
    latest: dict[int, Outcome] = {}
    best: Outcome | None = None
    settled = 0
    for turn, axis in enumerate(tuple(order) * _MAX_ROUNDS):
        to_come = order[turn + 1 :] if start is None else ()
        relaxed = bound * math.prod(problem.mesh.sizes[a] for a in to_come)
        tight = best is not None and best.thrifty
        found = latest[axis] = _solve_axis(problem, axis, assignment, relaxed, tight=tight)
        if best is None or turn < len(order) or _is_better(found, best, bound):
            best, assignment, settled = found, found.assignment, 1
        else:
            settled += 1
        if turn >= len(order) - 1 and settled >= len(order):
            break
    assert best is not None
    best = _loosen(problem, axis, best, bound)
    return _Descent(
        best.assignment,
        best.seconds,
        best.bytes,
        max(each.gap for each in latest.values()),
        tuple(latest[axis].shape for axis in sorted(latest)),
    )


def _is_better(found: Outcome, best: Outcome, bound: int) -> bool:
    """Whether it fits better into memory, or as well and is faster."""
    excess, least = max(found.bytes, bound), max(best.bytes, bound)
    return excess < least or (excess == least and found.seconds < best.seconds * (1 - 1e-9))


def _loosen(problem: Problem, axis: int, found: Outcome, bound: int) -> Outcome:
    """The plan that shards least among those as fast, if the bound is not tight any more."""
    if not found.thrifty:
        return found
    loose = AxisProgram(problem, axis, found.assignment, thrifty=False).solve()
    fits = loose is not None and loose.bytes <= bound
    return loose if loose and fits and loose.seconds <= found.seconds * (1 + 1e-9) else found


def _solve_axis(
    problem: Problem, axis: int, given: Assignment, bound: int, *, tight: bool
) -> Outcome:
    """The fastest assignment within the bound, or the smallest one if none is within.

    Unless memory is known to be `tight`, first as if there were no bound.
    """
    elsewhere = tuple((*labels[:axis], *labels[axis + 1 :]) for labels in given.labels)
    key = (axis, elsewhere, bound, tight)
    if key not in problem.solved:
        problem.solved[key] = _solve_anew(problem, axis, given, bound, tight)
    return problem.solved[key]


def _solve_anew(problem: Problem, axis: int, given: Assignment, bound: int, tight: bool) -> Outcome:
    if not tight:
        fastest = AxisProgram(problem, axis, given, thrifty=False).solve()
        if fastest is not None and fastest.bytes <= bound:
            return fastest
    program = AxisProgram(problem, axis, given, thrifty=True)
    found = program.solve(max_bytes=bound) or program.solve(minimize="bytes")
    if found is None:
        names = ", ".join(problem.mesh.names)
        raise SearchError(f"The recipe and the pins on the axes {names} leave no plan at all.")
    return found


def _unsplit(problem: Problem) -> Assignment:
    labels = tuple((UNSPLIT,) * len(problem.mesh.axes) for _ in problem.ops)
    return Assignment(labels, {}, {})


def expand(problem: Problem, assignment: Assignment, recipe: str, fingerprint: str) -> Plan:
    """The plan for the whole graph: what a class or entry decided, for every member."""
    graph, entries = problem.graph, problem.entries
    at = {name: (index, entry) for index, entry in enumerate(entries) for name in entry.names}

    def layout(tensor: str) -> Layout:
        return assignment.inputs.get(at[tensor][0], problem.whole)

    return Plan(
        mesh=problem.mesh,
        fingerprint=fingerprint,
        recipe=recipe,
        micro_batches=problem.micro_batches,
        parameters={
            name: assignment.parameters[at[tensor][0]] for name, tensor in graph.parameters.items()
        },
        inputs={name: layout(tensor) for name, tensor in graph.inputs.items()},
        ops={op.name: assignment.labels[problem.fold.class_of[op.name]] for op in graph.ops},
        precision=graph.precision,
    )


def _agree(found: _Descent, cost: Cost) -> None:
    assert math.isclose(found.seconds, cost.seconds, rel_tol=_TOLERANCE, abs_tol=1e-15), (
        f"the solver said {found.seconds!r} s, and the expanded plan costs {cost.seconds!r} s"
    )
    assert found.bytes == cost.memory_bytes, (
        f"the solver said {found.bytes} bytes, and the expanded plan takes {cost.memory_bytes}"
    )


def _does_not_fit(found: _Descent, bound: int, mesh: Mesh, recipe: str) -> SearchError:
    free = "" if recipe == "auto" else f' recipe="auto" instead of {recipe!r},'
    return SearchError(
        f"No plan for the mesh {mesh} fits into {format_bytes(bound)}: the smallest found takes "
        f"{format_bytes(found.bytes)} of a rank, {format_bytes(found.bytes - bound)} too much. "
        f"What would help:{free} more ranks, a smaller batch (or more micro-batches of a smaller "
        f"one), or memory_bytes={found.bytes} if a rank has that much."
    )
