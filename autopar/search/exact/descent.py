"""Descents over a mesh of several axes: solve one axis after another exactly, until no axis can be improved.

The program of one axis (`autopar.search.exact.milp`) finds the best choices along this axis, given those on the other
axes. Repeating it over the axes is a descent to a local optimum. Descents start

- with every axis unsplit, once in every order of the axes; in the first round the bound on memory is multiplied by the
  sizes of the axes that are still unsplit;
- at the best plan under every combination of recipes for the axes (`_FAMILIES`), and of `ddp` to `zero3` where they
  split the batch, so that naming a recipe never gives a faster plan than naming none.

The result is the fastest plan whose peak memory fits. Both figures are those of a whole step
(`autopar.pipeline.composed`), which reports show.

If the runtime overlaps communication with compute, the programs charge only the exposed part. It depends on the plan:
programs use the part that is exposed in the best plan so far, and are solved again until it stays the same
(`autopar.search.exact.prices`, [Note: exposure]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from autopar.errors import RecipeError, SearchError
from autopar.ir import UNSPLIT, Mesh
from autopar.search.exact.assignment_parts import composed
from autopar.search.exact.axis import AxisSolutions, excess, seconds_refused
from autopar.search.exact.decisions import Assignment, Outcome
from autopar.search.exact.prices import MarginalCosts
from autopar.search.exact.problem import Problem
from autopar.search.request.recipe_rows import RECIPES, Recipe

_MAX_ROUNDS = 8  # rounds over all axes; all descents seen so far ended after two or three
_FOLLOWED = 3  # descents without recipes start at the plans of this many of the best combinations
_MAX_EXPOSURES = 3  # number of times that programs are solved again with another exposure
# Step of a plan that counts as the fastest, as a multiple of a lower bound on all steps: twice the solver's tolerance.
_PROVEN = 1 + 2e-4
_TIGHTER = 0.8  # bound on memory of a second search, as a fraction of the best plan's memory

# One recipe for each way to split ops, which allows every way to store parameters. Its best plan is at least as fast
# as that of any recipe that splits ops in this way.
_FAMILIES = tuple(
    replace(RECIPES[name], stages=RECIPES["auto"].stages, gathers=True) for name in ("ddp", "tp", "tp+sp", "ep")
)


class _Combination(NamedTuple):
    """Recipes for the axes without one.

    Attributes:
        recipes: the recipes of all axes.
        fastest: the fastest plan under them, whatever memory it takes.
        least_seconds: weighed seconds that no plan under them that the search finds falls below.
    """

    recipes: tuple[Recipe, ...]
    fastest: Outcome
    least_seconds: float


def descents(problem: Problem, bound: int | None) -> list[Outcome]:
    """The results of the descents from all starts, under a bound on the bytes of a rank; None for no bound."""
    found = [_descend(problem, order, bound) for order in _orders(problem.mesh)]
    if _is_proven(problem, found, bound):
        return found  # no other start leads to a faster plan
    if bound is not None and problem.least_bytes > bound:
        return found  # nothing fits; the smallest plan of these shows how much is missing
    if bound is not None:
        # What hides seems free at the least slopes, so that descents within a bound that begin there may end worse.
        unhidden = problem.exposed(MarginalCosts.full())
        found += [_descend(unhidden, order, bound) for order in _orders(problem.mesh)]
    combinations = _combinations(problem)
    found += _from_recipes(problem, combinations, bound)
    stored = _by_storage(problem, combinations, _seconds_within(found, bound))
    found += _from_recipes(problem, stored, bound)
    found += _with_others_open(problem, stored, bound)
    combinations += stored
    best = best_of(found, bound)
    if bound is not None and fits(best, bound) and len(problem.recipes) > 1:
        found.append(_from_tighter_bound(problem, best, bound))
    for _ in range(_MAX_EXPOSURES):
        best = best_of(found, bound)
        exposure = MarginalCosts.of(composed(problem, best.assignment))
        if exposure == problem.exposure:
            break
        problem = problem.exposed(exposure)
        found.append(_descend(problem, _axes(problem), bound, start=best.assignment))
        combinations = _again(problem, combinations, _seconds_within(found, bound))
        found += _from_recipes(problem, combinations, bound)
    return found


def may_fit_freely(problem: Problem, bound: int) -> bool:
    """Whether the fastest plan without a bound on memory may stay within one: that of the first descents does."""
    return fits(best_of([_descend(problem, order, None) for order in _orders(problem.mesh)], None), bound)


def _is_proven(problem: Problem, found: Sequence[Outcome], bound: int | None) -> bool:
    """Whether the plan of the first descent is known to be the fastest, but for the solver's tolerance.

    On a mesh of one axis a descent solves a single program. If everything hides in its plan that the program lets
    hide, the solver's bound on the program is one for every plan, whatever its slopes.
    """
    first, *others = found
    is_near = first.weighed_seconds <= _PROVEN * first.least_seconds
    return not others and _axis_of(problem.mesh) is not None and is_near and fits(first, bound)


def least_seconds_within(problem: Problem, bound: int) -> float:
    """A lower bound on the weighed seconds of all plans within a bound on memory; 0 where none is known.

    It is known on meshes of one axis, and takes much less time than the search of a plan. It is infinite where it
    shows that no plan fits.
    """
    axis = _axis_of(problem.mesh)
    if axis is None:
        return 0.0
    return AxisSolutions.of(problem, axis, _unsplit(problem)).least_seconds(bound)


def smallest_fits(problem: Problem, bound: int) -> bool:
    """Whether the plan of least memory fits, on a mesh of one axis."""
    axis = _axis_of(problem.mesh)
    assert axis is not None, "several axes have no plan that is known to be the smallest"
    return fits(AxisSolutions.of(problem, axis, _unsplit(problem)).smallest, bound)


def _axis_of(mesh: Mesh) -> int | None:
    """The only axis of a mesh that has more than one rank; None if there are several such axes."""
    (axis, *_), *others = _orders(mesh)
    return None if others else axis


def _seconds_within(found: Sequence[Outcome], bound: int | None) -> float:
    """Weighed seconds of the best plan that fits into memory; infinite without one."""
    best = best_of(found, bound)
    return best.weighed_seconds if fits(best, bound) else math.inf


def best_of(descents: Sequence[Outcome], bound: int | None) -> Outcome:
    """The fastest descent that fits into memory; if none fits, the one that takes least memory."""
    return min(descents, key=partial(_rank, bound))


def _rank(bound: int | None, each: Outcome) -> tuple[float, float]:
    """A key that sorts plans: first by the bytes beyond the bound on memory, then by weighed seconds."""
    return excess(each.bytes, bound), each.weighed_seconds


def fits(each: Outcome, bound: int | None) -> bool:
    """Whether a plan stays within a bound on memory, in bytes."""
    return excess(each.bytes, bound) == 0


def _orders(mesh: Mesh) -> list[tuple[int, ...]]:
    """Every order of the axes that have more than one rank, beginning with the order of the mesh."""
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1] or [0]
    return list(itertools.permutations(axes))


def _axes(problem: Problem) -> Sequence[int]:
    return range(len(problem.recipes))


def _from_recipes(problem: Problem, combinations: Sequence[_Combination], bound: int | None) -> list[Outcome]:
    """Descents under combinations of recipes for the axes without one, and descents without recipes from the best.

    A combination is skipped if even its fastest plan without a bound is slower than a plan found within the bound.
    """
    found: dict[object, Outcome] = {}
    best_seconds = math.inf
    for recipes, fastest, _ in combinations:
        if fastest.weighed_seconds >= best_seconds:
            break
        under = problem.under(recipes)
        each = fastest if bound is None else _descend(under, _axes(problem), bound)
        if fits(each, bound):
            best_seconds = min(best_seconds, each.weighed_seconds)
        found.setdefault((each.assignment.labels, *each.assignment.parameters.values()), each)
    ranked = sorted(found.values(), key=partial(_rank, bound))
    return ranked + [_descend(problem, _axes(problem), bound, start=each.assignment) for each in ranked[:_FOLLOWED]]


def _combinations(problem: Problem) -> list[_Combination]:
    """Every combination of recipes for the axes without one, with its plan under no bound on memory, fastest first."""
    free = [axis for axis, row in enumerate(problem.recipes) if row.may is None]
    free = [axis for axis in free if problem.mesh.sizes[axis] > 1]
    named = []
    for families in itertools.product(_families(problem), repeat=len(free)) if free else ():
        rows = list(problem.recipes)
        for axis, row in zip(free, families, strict=True):
            rows[axis] = row
        named.append(tuple(rows))
    return sorted(_solved(problem, named), key=lambda each: each.fastest.weighed_seconds)


def _solved(problem: Problem, named: Iterable[tuple[Recipe, ...]]) -> Iterator[_Combination]:
    """Combinations of recipes with their plans under no bound on memory, but for those that leave none."""
    for rows in named:
        try:
            fastest = _descend(problem.under(rows), _axes(problem), None)
        except (RecipeError, SearchError):
            continue  # pins, or layouts of placed parameters, contradict this combination
        yield _Combination(rows, fastest, fastest.least_seconds)


def _by_storage(problem: Problem, known: Sequence[_Combination], best_seconds: float) -> list[_Combination]:
    """Combinations that say for some axes that split the batch how they store parameters, as `ddp` and `zero3` do.

    Where gathers take about as long as what hides them, a change of slopes turns the storage of all parameters at once,
    so that descents without recipes pass over hybrid sharding. On one axis the program compares all storages itself.
    Combinations are left out as in `_again`.
    """
    if _axis_of(problem.mesh) is not None:
        return []
    named = [
        rows
        for each in known
        if each.least_seconds < best_seconds and each.fastest.weighed_seconds > _PROVEN * each.least_seconds
        for rows in itertools.product(*map(_stored_alike, each.recipes))
        if rows != each.recipes and _may_reduce(rows)
    ]
    return sorted(_solved(problem, named), key=lambda each: each.fastest.weighed_seconds)


def _with_others_open(problem: Problem, stored: Sequence[_Combination], bound: int | None) -> list[Outcome]:
    """Descents with the same ways to store parameters and the other axes open, as where a person names one axis.

    They are at the slopes of the problem and at those of a step that hides nothing, of which either may end better. The
    best without a bound are followed under the bound.
    """
    storages = _named_alike(_FAMILIES[0])
    opened = dict.fromkeys(
        tuple(row if row in storages else free for row, free in zip(each.recipes, problem.recipes, strict=True))
        for each in stored
        if any(row not in storages for row in each.recipes)
    )
    slopes = problem, problem.exposed(MarginalCosts.full())
    solved = [(at.under(each.recipes), each.fastest) for at in slopes for each in _solved(at, opened)]
    solved.sort(key=lambda each: each[1].weighed_seconds)
    return [_descend(at, _axes(at), bound, start=fastest.assignment) for at, fastest in solved[:_FOLLOWED]]


def _again(problem: Problem, known: Sequence[_Combination], best_seconds: float) -> list[_Combination]:
    """The same combinations at other slopes, each searched from its plan at the slopes before, fastest first.

    A combination is left out if a plan that fits is faster than the combination's plan would be with everything hidden
    that can be: no slopes make one of its plans faster than that.
    """
    found = [
        each._replace(
            fastest=_descend(problem.under(each.recipes), _axes(problem), None, start=each.fastest.assignment)
        )
        for each in known
        if each.least_seconds < best_seconds
    ]
    return sorted(found, key=lambda each: each.fastest.weighed_seconds)


def named_recipes(problem: Problem) -> Iterator[tuple[float, Problem]]:
    """The problem under every combination of recipes that users can name for the axes without one.

    Yields:
        A lower bound on the seconds of a step under these recipes, and the problem under them, smallest bound first.
        The bound is that of the fastest plan that splits ops in the same way, whatever memory it takes.
    """
    for recipes, fastest, _ in _combinations(problem):
        kinds = [_named_alike(row) for row in recipes]
        for rows in itertools.product(*kinds):
            if _may_reduce(rows):
                yield fastest.seconds, problem.under(rows)


def _named_alike(row: Recipe) -> tuple[Recipe, ...]:
    """All recipes that split ops in the way of a row of `_FAMILIES`; for any other row, only the row itself."""
    if row not in _FAMILIES:
        return (row,)
    return tuple(
        each
        for each in RECIPES.values()
        if (each.may, each.must, each.products_must) == (row.may, row.must, row.products_must)
        and (each.tier, each.owner) == (row.tier, row.owner)
    )


def _may_reduce(rows: Iterable[Recipe]) -> bool:
    """Whether recipes of all axes agree on when gradients are reduced; `resolve` refuses others."""
    return not {(1,), (2,)} <= {row.stages for row in rows}


def _stored_alike(row: Recipe) -> tuple[Recipe, ...]:
    """A row of `_FAMILIES` that splits the batch, also with each way to store parameters; any other row as it is."""
    return (row, *_named_alike(row)) if row is _FAMILIES[0] else (row,)


def _families(problem: Problem) -> tuple[Recipe, ...]:
    """The rows of `_FAMILIES` for a problem: the one for experts only if the model has experts."""
    has_experts = any("expert" in factor.roles for factor in problem.graph.factors.values())
    return tuple(row for row in _FAMILIES if row.name != "ep" or has_experts)


def _from_tighter_bound(problem: Problem, best: Outcome, bound: int) -> Outcome:
    """A descent that starts at the best plan under a tighter bound, so that more memory never gives a slower plan."""
    smaller = _descend(problem, _axes(problem), int(_TIGHTER * best.bytes))
    return _descend(problem, _axes(problem), bound, start=smaller.assignment)


def _descend(problem: Problem, order: Sequence[int], bound: int | None, start: Assignment | None = None) -> Outcome:
    """Solves axis after axis, round after round, until every axis is the best one given the others.

    Without a `start` all axes begin unsplit. In the first round the bound is multiplied by the sizes of the axes that
    are still to come.
    """
    assignment = start or _unsplit(problem)
    best: Outcome | None = None
    settled, refused = 0, math.inf
    for turn, axis in enumerate(tuple(order) * _MAX_ROUNDS):
        to_come = order[turn + 1 :] if start is None else ()
        others = math.prod(problem.mesh.sizes[a] for a in to_come)
        relaxed = None if bound is None else bound * others
        solutions = AxisSolutions.of(problem, axis, assignment)
        if best is not None:
            solutions.knows(best.bytes)
        is_tight = best is not None and best.saves_memory
        found = _solution(solutions, relaxed, is_tight)
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
    return replace(best, refused_seconds=refused)


def _solution(solutions: AxisSolutions, bound: int | None, is_tight: bool) -> Outcome:
    """The fastest assignment within the bound, or the smallest one if none is within.

    Unless `is_tight`, the program without a bound is tried first, because it is easier to solve.
    """
    fastest = None if is_tight and bound is not None else solutions.fastest
    if fastest is not None and fits(fastest, bound):
        return fastest
    return solutions.smallest if bound is None else solutions.within(bound)


def _is_better(found: Outcome, best: Outcome, bound: int | None) -> bool:
    """Whether `found` exceeds the bound by less than `best`, or by as much and is faster."""
    over, least = excess(found.bytes, bound), excess(best.bytes, bound)
    return over < least or (over == least and found.weighed_seconds < best.weighed_seconds * (1 - 1e-9))


def _loosen(problem: Problem, axis: int, found: Outcome, bound: int | None) -> Outcome:
    """The plan that the program without a bound gives, if it fits and is as fast as `found`: it shards less."""
    if not found.saves_memory:
        return found
    loose = AxisSolutions.of(problem, axis, found.assignment).fastest
    is_as_good = loose is not None and fits(loose, bound)
    return loose if loose and is_as_good and loose.weighed_seconds <= found.weighed_seconds * (1 + 1e-9) else found


def _unsplit(problem: Problem) -> Assignment:
    labels = tuple((UNSPLIT,) * len(problem.mesh.axes) for _ in problem.ops)
    return Assignment(labels, {}, {})
