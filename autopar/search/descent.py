"""Descents: one mesh axis after another is solved exactly, until none can be improved.

The program of one axis (`autopar.search.milp`) is exact given the other axes. Descents begin

- with every axis unsplit, in every order of the axes, memory relaxed by what the axes still to
  come can divide;
- at every combination of recipes that a person can name for the axes (`_FAMILIES`), each the best
  plan under that combination.

Every outcome is ranked by its composed step among those whose composed peak fits
(`autopar.pipeline.composed`): no recipe beats the open search, and what fits is what is said to fit.
Where the runtime hides communication, programs charge it at the slopes of the best plan so far, and
are solved again until the slopes stay (`autopar.search.prices`, [Note: exposure]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import RecipeError, SearchError
from autopar.ir import UNSPLIT, Mesh
from autopar.search.axis import AxisSolutions, excess, seconds_refused
from autopar.search.milp import Outcome
from autopar.search.prices import Exposure
from autopar.search.problem import Assignment, Problem
from autopar.search.recipes import RECIPES, Recipe

_MAX_ROUNDS = 8  # over all axes; descents seen so far end after two or three
_FOLLOWED = 3  # combinations of recipes, the best, from which the open search goes on
_MAX_EXPOSURES = 3  # solutions at other slopes of the step
_LEAN = 0.8  # of the memory that the best plan takes: enough to forbid it

# Rows that bound what recipes of one kind can find: they split ops alike, and any of the ways to
# store parameters that the recipes name is open to them.
_FAMILIES = tuple(
    replace(RECIPES[name], stages=RECIPES["auto"].stages, gathers=True)
    for name in ("ddp", "tp", "tp+sp", "ep")
)


@dataclass(frozen=True)
class Descent:
    """Where a descent ended.

    Attributes:
        assignment: the decisions.
        seconds: composed duration of a step.
        bytes: composed peak memory of a rank, in bytes.
        weighed_seconds: seconds, and the price of the bytes where the problem has one.
        gap: the largest relative gap that the solver left open along one axis, 0 if proven.
        programs: rows, columns and binaries of the program of every axis, in order.
        refused_seconds: the fastest assignment on the way that did not fit; infinite for none.
    """

    assignment: Assignment
    seconds: float
    bytes: float
    weighed_seconds: float
    gap: float
    programs: tuple[tuple[int, int, int], ...]
    refused_seconds: float = math.inf


def descents(problem: Problem, bound: int | None) -> list[Descent]:
    """Where the descents from every start end, for a bound on the bytes of a rank."""
    found = [_descend(problem, order, bound) for order in _orders(problem.mesh)]
    if bound is not None and problem.least_bytes > bound:
        return found  # nothing fits, and the smallest of these says by how much
    found += _from_recipes(problem, bound)
    best = best_of(found, bound)
    if bound is not None and fits(best, bound) and len(problem.recipes) > 1:
        found.append(_from_lean(problem, best, bound))
    for _ in range(_MAX_EXPOSURES):
        best = best_of(found, bound)
        exposure = Exposure.of(problem.composed(best.assignment))
        if exposure == problem.exposure:
            break
        problem = problem.exposed(exposure)
        found.append(_descend(problem, _axes(problem), bound, start=best.assignment))
        found += _from_recipes(problem, bound)
    return found


def best_of(descents: Sequence[Descent], bound: int | None) -> Descent:
    """The fastest that fits; if none does, the smallest."""
    return min(descents, key=partial(_rank, bound))


def _rank(bound: int | None, each: Descent) -> tuple[float, float]:
    return excess(each.bytes, bound), each.weighed_seconds


def fits(each: Descent | Outcome, bound: int | None) -> bool:
    """Whether a plan is within a bound on memory."""
    return excess(each.bytes, bound) == 0


def _orders(mesh: Mesh) -> list[tuple[int, ...]]:
    """Every order of the axes that have more than one rank; the first, slowest, axis leads."""
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1] or [0]
    return list(itertools.permutations(axes))


def _axes(problem: Problem) -> Sequence[int]:
    return range(len(problem.recipes))


def _from_recipes(problem: Problem, bound: int | None) -> list[Descent]:
    """The best plan under every combination of recipes for the open axes, and where the best lead.

    A combination is left out where it is slower without any bound than what was found within the bound.
    """
    found: dict[object, Descent] = {}
    best_seconds = math.inf
    for unbounded, under in _combinations(problem):
        if unbounded.weighed_seconds >= best_seconds:
            break
        each = _descend(under, _axes(problem), bound)
        if fits(each, bound):
            best_seconds = min(best_seconds, each.weighed_seconds)
        found.setdefault((each.assignment.labels, *each.assignment.parameters.values()), each)
    ranked = sorted(found.values(), key=partial(_rank, bound))
    return ranked + [
        _descend(problem, _axes(problem), bound, start=each.assignment)
        for each in ranked[:_FOLLOWED]
    ]


def _combinations(problem: Problem) -> list[tuple[Descent, Problem]]:
    """Every combination of recipes for the open axes with its plan if memory is no matter, fastest first."""
    free = [axis for axis, row in enumerate(problem.recipes) if row.may is None]
    free = [axis for axis in free if problem.mesh.sizes[axis] > 1]
    found = []
    for families in itertools.product(_families(problem), repeat=len(free)) if free else ():
        rows = list(problem.recipes)
        for axis, row in zip(free, families, strict=True):
            rows[axis] = row
        under = problem.under(rows)
        try:
            found.append((_descend(under, _axes(problem), None), under))
        except (RecipeError, SearchError):
            continue  # pins, or where parameters lie already, leave nothing of this combination
    return sorted(found, key=lambda pair: pair[0].weighed_seconds)


def named_recipes(problem: Problem) -> Iterator[tuple[float, Problem]]:
    """The problem under every combination of recipes that a person can name for its open axes.

    Yields:
        Composed seconds of the fastest plan that splits ops alike, however it stores parameters, and the problem
        under the recipes; the fastest kind of split leads.
    """
    for fastest, under in _combinations(problem):
        kinds = [_named_alike(row) for row in under.recipes]
        for rows in itertools.product(*kinds):
            if {(1,), (2,)} <= {row.stages for row in rows}:
                continue  # `check_reductions` refuses these
            try:
                named = problem.under(rows)
            except RecipeError:
                continue  # a pin rules the recipe out
            yield fastest.seconds, named


def _named_alike(row: Recipe) -> tuple[Recipe, ...]:
    """The recipes that split ops as a row of `_FAMILIES` does; any other row alone."""
    if row not in _FAMILIES:
        return (row,)
    return tuple(
        each
        for each in RECIPES.values()
        if (each.may, each.must, each.products_must) == (row.may, row.must, row.products_must)
        and (each.tier, each.owner) == (row.tier, row.owner)
    )


def _families(problem: Problem) -> tuple[Recipe, ...]:
    """Rows to begin with; that of experts only where there are some."""
    has_experts = any("expert" in factor.roles for factor in problem.graph.factors.values())
    return tuple(row for row in _FAMILIES if row.name != "ep" or has_experts)


def _from_lean(problem: Problem, best: Descent, bound: int) -> Descent:
    """A descent from where less memory would have led: room must not make a plan worse."""
    lean = _descend(problem, _axes(problem), int(_LEAN * best.bytes))
    return _descend(problem, _axes(problem), bound, start=lean.assignment)


def _descend(
    problem: Problem, order: Sequence[int], bound: int | None, start: Assignment | None = None
) -> Descent:
    """Solves axis after axis, round after round, until every axis is best given the others.

    Without a `start` the axes to come are unsplit in the first round, and memory is relaxed by
    them.
    """
    assignment = start or _unsplit(problem)
    latest: dict[int, Outcome] = {}
    best: Outcome | None = None
    settled, refused = 0, math.inf
    for turn, axis in enumerate(tuple(order) * _MAX_ROUNDS):
        to_come = order[turn + 1 :] if start is None else ()
        others = math.prod(problem.mesh.sizes[a] for a in to_come)
        relaxed = None if bound is None else bound * others
        solutions = AxisSolutions.of(problem, axis, assignment)
        is_tight = best is not None and best.thrifty
        found = latest[axis] = _solution(solutions, relaxed, is_tight)
        if not is_tight:
            refused = min(refused, seconds_refused(solutions.fastest, relaxed))
        if best is None or turn < len(order) or _is_better(found, best, bound):
            best, assignment, settled = found, found.assignment, 1
        else:
            settled += 1
        if turn >= len(order) - 1 and settled >= len(order):
            break
    assert best is not None
    best = _loosen(problem, axis, best, bound)
    return Descent(
        best.assignment, best.seconds, best.bytes, best.weighed_seconds, max(each.gap for each in latest.values()),
        tuple(latest[axis].shape for axis in sorted(latest)), refused,
    )  # fmt: skip


def _solution(solutions: AxisSolutions, bound: int | None, is_tight: bool) -> Outcome:
    """The fastest assignment within the bound, or the smallest one if none is within.

    Unless memory is known to be tight, first as if there were no bound.
    """
    fastest = None if is_tight and bound is not None else solutions.fastest
    if fastest is not None and fits(fastest, bound):
        return fastest
    return solutions.smallest if bound is None else solutions.within(bound)


def _is_better(found: Outcome, best: Outcome, bound: int | None) -> bool:
    """Whether it fits better into memory, or as well and is faster."""
    over, least = excess(found.bytes, bound), excess(best.bytes, bound)
    return over < least or (
        over == least and found.weighed_seconds < best.weighed_seconds * (1 - 1e-9)
    )


def _loosen(problem: Problem, axis: int, found: Outcome, bound: int | None) -> Outcome:
    """The plan that shards least among those as fast, if the bound is not tight any more."""
    if not found.thrifty:
        return found
    loose = AxisSolutions.of(problem, axis, found.assignment).fastest
    is_as_good = loose is not None and fits(loose, bound)
    return (
        loose
        if loose and is_as_good and loose.weighed_seconds <= found.weighed_seconds * (1 + 1e-9)
        else found
    )


def _unsplit(problem: Problem) -> Assignment:
    labels = tuple((UNSPLIT,) * len(problem.mesh.axes) for _ in problem.ops)
    return Assignment(labels, {}, {})
