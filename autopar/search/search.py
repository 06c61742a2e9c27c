"""The search for a plan: one mesh axis at a time, from several starts, until nothing changes.

The program of one axis (`autopar.search.milp`) is exact given the other axes. `search` solves it
axis by axis until no axis can be improved. Descents begin

- with every axis unsplit, in every order of the axes, memory relaxed by what the axes still to
  come can divide;
- at every combination of recipes that a person can name for the axes (`_FAMILIES`), each the best
  plan under that combination.

Every plan is ranked by its composed step among those whose composed peak fits
(`autopar.pipeline.composed`): no recipe beats the open search, and what fits is what is said to fit.
Where the runtime hides communication, programs charge it at the slopes of the best plan so far, and
are solved again until the slopes stay (`autopar.search.prices`, [Note: exposure]).

The best plan is expanded to the whole graph, composed again node by node, and must cost what the
folded graph said. One axis is solved to a proven optimum (to 0.01 % where memory binds). Over several
axes the result is a local optimum: no single axis can be improved while the others stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_model import Hardware
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.errors import MeshError, RecipeError, SearchError
from autopar.ir import PIPELINE_AXIS, UNSPLIT, Graph, Layout, Mesh, ParameterPlan, Plan
from autopar.pipeline.composed import StepCost, cost_of
from autopar.search.checks import check_axes, check_used
from autopar.search.milp import AxisProgram, Outcome
from autopar.search.notes import explain
from autopar.search.pins import resolve_pins
from autopar.search.prices import Exposure
from autopar.search.problem import Assignment, Problem
from autopar.search.recipes import RECIPES, Recipe, RecipeLike, format_recipe, resolve
from autopar.units import format_bytes

_MAX_ROUNDS = 8  # over all axes; descents seen so far end after two or three
_FOLLOWED = 3  # combinations of recipes, the best, from which the open search goes on
_MAX_EXPOSURES = 3  # solutions at other slopes of the step
_LEAN = 0.8  # of the memory that the best plan takes: enough to forbid it
_TOLERANCE = 1e-6  # relative, between the price of the folded graph and that of the plan

# Rows that bound what recipes of one kind can find: they split ops alike, and any of the ways to
# store parameters that the recipes name is open to them.
_FAMILIES = tuple(
    replace(RECIPES[name], stages=RECIPES["auto"].stages, gathers=True)
    for name in ("ddp", "tp", "tp+sp", "ep")
)


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
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
) -> Plan:
    """Finds the fastest plan for `graph` on `mesh` that fits into memory.

    Args:
        graph: the captured model, at the size of one micro-batch.
        hardware: figures that the prices are made of.
        recipe: constraints, see `autopar.search.recipes`.
        pins: single choices that are fixed, see `autopar.search.pins`.
        memory_bytes: bound on the bytes of a rank; None for no bound.
        micro_batches: number of micro-batches of a step.
        fingerprint: hash of the captured model, which the plan notes.
        fixed_storage: parameters whose plan is already made, by name.
        software: figures of the runtime.
        training_state: bytes that training keeps in addition to parameters.

    Raises RecipeError for a recipe or pin that cannot hold, MeshError for an axis that divides
    nothing, SearchError if no plan fits into memory.
    """
    found = search_with_cost(
        graph, mesh, hardware=hardware, recipe=recipe, pins=pins, memory_bytes=memory_bytes,
        micro_batches=micro_batches, fingerprint=fingerprint, fixed_storage=fixed_storage,
        software=software, training_state=training_state,
    )  # fmt: skip
    return found.plan


@dataclass(frozen=True)
class Found:
    """A plan with its price and what is known about its optimality.

    Attributes:
        plan: the plan.
        cost: composed time and memory of the plan.
        gap: the largest relative gap that the solver left open along one axis, 0 if proven.
        programs: rows, columns and binaries of the program of every axis, in order.
        descents: seconds of the plan that every start ended in, inf where it did not fit.
        is_tight: whether something faster was found that does not fit.
    """

    plan: Plan
    cost: StepCost
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
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
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
        software=software, training_state=training_state,
    )  # fmt: skip
    descents = _descents(problem, memory_bytes)
    best = _best(descents, memory_bytes)
    if not _fits(best, memory_bytes):
        assert memory_bytes is not None, "without a bound everything fits"
        raise _does_not_fit(best, memory_bytes, mesh, format_recipe(recipe))
    plan = expand(problem, best.assignment, format_recipe(recipe), fingerprint)
    check_used(graph, plan, rows)
    cost = cost_of(graph, plan, hardware, software=software, training_state=training_state)
    _agree(best, cost)
    seconds = tuple(d.seconds if _fits(d, memory_bytes) else math.inf for d in descents)
    notes = explain(
        graph, plan, cost, bound_bytes=memory_bytes or hardware.memory_bytes, hardware=hardware,
        descents_seconds=seconds,
    )  # fmt: skip
    is_tight = any(d.seconds < best.seconds for d in descents) or any(
        each.thrifty for each in problem.solved.values()
    )
    return Found(replace(plan, notes=notes), cost, best.gap, best.programs, seconds, is_tight)


def _descents(problem: Problem, bound: int | None) -> list[_Descent]:
    """Where every start ends; see the top of this file."""
    found = [_descend(problem, order, bound) for order in _orders(problem.mesh)]
    found += _from_recipes(problem, bound)
    best = _best(found, bound)
    if bound is not None and _fits(best, bound) and len(problem.recipes) > 1:
        found.append(_from_lean(problem, best, bound))
    for _ in range(_MAX_EXPOSURES):
        best = _best(found, bound)
        exposure = Exposure.of(problem.composed(best.assignment))
        if exposure == problem.exposure:
            break
        problem = problem.exposed(exposure)
        found.append(_descend(problem, _axes(problem), bound, start=best.assignment))
        found += _from_recipes(problem, bound)
    return found


def _best(descents: Sequence[_Descent], bound: int | None) -> _Descent:
    """The fastest that fits; if none does, the smallest."""
    return min(descents, key=lambda each: (_excess(each, bound), each.seconds))


def _excess(each: _Descent | Outcome, bound: int | None) -> float:
    return 0.0 if bound is None else max(0.0, each.bytes - bound)


def _fits(each: _Descent | Outcome, bound: int | None) -> bool:
    return _excess(each, bound) == 0


def meshes_of(world_size: int, named: Sequence[str] = ()) -> Iterator[Mesh]:
    """All meshes of at most two axes, dp and tp, with `world_size` ranks.

    A recipe that names one axis is tried on that axis alone too, one that names both on two axes only.
    """
    if world_size == 1:
        yield Mesh(tuple((name, 1) for name in named or ("dp",)))
        return
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
    bytes: float
    gap: float
    programs: tuple[tuple[int, int, int], ...]


def _axes(problem: Problem) -> Sequence[int]:
    return range(len(problem.recipes))


def _from_recipes(problem: Problem, bound: int | None) -> list[_Descent]:
    """The best plan under every combination of recipes for the open axes, and where the best lead."""
    free = [axis for axis, row in enumerate(problem.recipes) if row.may is None]
    free = [axis for axis in free if problem.mesh.sizes[axis] > 1]
    found: dict[object, _Descent] = {}
    for families in itertools.product(_families(problem), repeat=len(free)) if free else ():
        rows = list(problem.recipes)
        for axis, row in zip(free, families, strict=True):
            rows[axis] = row
        try:
            each = _descend(problem.under(rows), _axes(problem), bound)
        except (RecipeError, SearchError):
            continue  # pins, or where parameters lie already, leave nothing of this combination
        found.setdefault((each.assignment.labels, *each.assignment.parameters.values()), each)
    ranked = sorted(found.values(), key=lambda each: (_excess(each, bound), each.seconds))
    return ranked + [
        _descend(problem, _axes(problem), bound, start=each.assignment)
        for each in ranked[:_FOLLOWED]
    ]


def _families(problem: Problem) -> tuple[Recipe, ...]:
    """Rows to begin with; that of experts only where there are some."""
    has_experts = any("expert" in factor.roles for factor in problem.graph.factors.values())
    return tuple(row for row in _FAMILIES if row.name != "ep" or has_experts)


def _from_lean(problem: Problem, best: _Descent, bound: int) -> _Descent:
    """A descent from where less memory would have led: room must not make a plan worse."""
    lean = _descend(problem, _axes(problem), int(_LEAN * best.bytes))
    return _descend(problem, _axes(problem), bound, start=lean.assignment)


def _descend(
    problem: Problem, order: Sequence[int], bound: int | None, start: Assignment | None = None
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
        others = math.prod(problem.mesh.sizes[a] for a in to_come)
        relaxed = None if bound is None else bound * others
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


def _is_better(found: Outcome, best: Outcome, bound: int | None) -> bool:
    """Whether it fits better into memory, or as well and is faster."""
    excess, least = _excess(found, bound), _excess(best, bound)
    return excess < least or (excess == least and found.seconds < best.seconds * (1 - 1e-9))


def _loosen(problem: Problem, axis: int, found: Outcome, bound: int | None) -> Outcome:
    """The plan that shards least among those as fast, if the bound is not tight any more."""
    if not found.thrifty:
        return found
    loose = AxisProgram(problem, axis, found.assignment, thrifty=False).solve()
    is_as_good = loose is not None and _fits(loose, bound)
    return loose if loose and is_as_good and loose.seconds <= found.seconds * (1 + 1e-9) else found


def _solve_axis(
    problem: Problem, axis: int, given: Assignment, bound: int | None, *, tight: bool
) -> Outcome:
    """The fastest assignment within the bound, or the smallest one if none is within.

    Unless memory is known to be `tight`, first as if there were no bound.
    """
    elsewhere = tuple((*labels[:axis], *labels[axis + 1 :]) for labels in given.labels)
    key = (axis, elsewhere, bound, tight)
    if key not in problem.solved:
        problem.solved[key] = _solve_anew(problem, axis, given, bound, tight)
    return problem.solved[key]


def _solve_anew(
    problem: Problem, axis: int, given: Assignment, bound: int | None, tight: bool
) -> Outcome:
    if not tight or bound is None:
        fastest = AxisProgram(problem, axis, given, thrifty=False).solve()
        if fastest is not None and _fits(fastest, bound):
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


def _agree(found: _Descent, cost: StepCost) -> None:
    assert math.isclose(found.seconds, cost.seconds, rel_tol=_TOLERANCE, abs_tol=1e-15), (
        f"the search said {found.seconds!r} s, and the expanded plan costs {cost.seconds!r} s"
    )
    assert math.isclose(found.bytes, cost.memory_bytes, rel_tol=_TOLERANCE), (
        f"the search said {found.bytes} bytes, and the expanded plan takes {cost.memory_bytes}"
    )


def _does_not_fit(found: _Descent, bound: int, mesh: Mesh, recipe: str) -> SearchError:
    needed = math.ceil(found.bytes)
    free = "" if recipe == "auto" else f' recipe="auto" instead of {recipe!r},'
    return SearchError(
        f"No plan for the mesh {mesh} fits into {format_bytes(bound)}: the smallest found takes "
        f"{format_bytes(needed)} of a rank, {format_bytes(needed - bound)} too much. "
        f"What would help:{free} more ranks, a smaller batch (or more micro-batches of a smaller "
        f"one), or memory_bytes={needed} if a rank has that much."
    )
