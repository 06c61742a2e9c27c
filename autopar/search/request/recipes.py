"""Recipes: named sets of constraints on the search, as rows of a table.

A recipe constrains one mesh axis: which factors (named model dimensions) ops may split, which they must split, and how
parameters may be stored. It selects factors by their roles (`autopar.ir.Factor.roles`), never by name:

    batch    the leading dim of an input, or the dim over which ops compute samples separately
    model    a dim of a parameter that is not a dim of an input, is not normalized over and does not number experts:
             Megatron's columns and rows (heads, ffn), but not the residual stream
    seq      any other dim of an input
    expert   the dim of a weight that numbers the experts of a mixture
    width    a dim of a parameter that is normalized over: the width of the residual stream

Under every recipe an op may also run unsplit, or apply a linear op to partial sums. A recipe is written as one name for
all axes, `zero3`, or one for each, `dp:zero3,tp:tp+sp`; axes that are not named are `auto`. Tensor parallelism in
two or three dims is a recipe over several axes, `x,y:2d`, which stands for one of each
(`autopar.search.request.several_axes`).

The recipes of the pipeline axis `pp` are its schedules, and `naive-pp`, which is GPipe with a single micro-batch. (The
schedules of `autopar.ir.VERSIONED` change the result of training.) `split_recipe` separates these recipes from those of
the other axes. `1f1b` alone leaves all other axes to `auto`; in `pp:1f1b,dp:zero1` the axis `dp` has its own recipe.

Under the recipes `local:K`, `geo:K` and `diloco:K` the ranks along an axis belong to different replicas of the model,
which exchange parameters every K steps (`autopar.ir.meeting`); under `async-server:S` they do so after every step with
one rank that keeps the common parameters, and may be S exchanges ahead of the slowest. The result of training is then
another one, so the search never chooses such a recipe by itself. `meeting_of` reads it, and `split_recipe` leaves it
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import RecipeError, did_you_mean
from autopar.ir import PIPELINE_AXIS, Meeting, Mesh
from autopar.ir.files import is_count
from autopar.ir.meeting import RULES, SERVER
from autopar.search.request.recipe_rows import ALIASES, MEETING_RECIPES, PIPELINE_RECIPES, RECIPES, Recipe, RecipeLike
from autopar.search.request.several_axes import SEVERAL_AXES, by_axis, over_mesh


def split_recipe(recipe: RecipeLike) -> tuple[str, RecipeLike]:
    """The recipe of the pipeline axis ("" for none), and the recipe of the axes inside a stage.

    Raises RecipeError where the pipeline axis is given a recipe that only other axes can have.
    """
    named = _parse(_inside_replica(recipe))
    if isinstance(named, str):
        return (named, "auto") if named in PIPELINE_RECIPES else ("", named)
    if PIPELINE_AXIS not in named:
        return "", named
    schedule = named[PIPELINE_AXIS]
    if schedule != "auto":
        _check_pipeline_recipe(schedule)
    rest = {axis: name for axis, name in named.items() if axis != PIPELINE_AXIS}
    return "" if schedule == "auto" else schedule, rest or "auto"


def meeting_of(recipe: RecipeLike, mesh: Mesh | None) -> Meeting | None:
    """The replicas that a recipe asks for on the mesh of all ranks; None for a recipe without replicas.

    >>> str(meeting_of("far:diloco:10,dp:zero3", Mesh.parse("far=2,dp=4")))
    'every 10 steps diloco momentum=0.9 rate=0.7'

    Raises RecipeError for replicas along several axes, along one that is not the first, or without a mesh.
    """
    named, axes = _parse(recipe), _meetings(recipe)
    if not axes:
        return None
    (axis, name), *others = axes.items()
    if mesh is None:
        raise RecipeError(
            f"The recipe {name!r} was asked for without a mesh. Give the axis of the replicas, such as "
            f"mesh={{'dp': 4}}, recipe={name!r}."
        )
    if PIPELINE_AXIS in mesh.names:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} was asked for on the mesh {mesh}: replicas and pipeline stages "
            f"cannot be run together yet. Take a mesh without the axis {PIPELINE_AXIS}, such as "
            f"mesh={{'dp': {mesh.size}}}, or a recipe without replicas, such as ddp."
        )
    first = mesh.placed.names[0]
    axis = axis or first
    if others or (isinstance(named, str) and len(mesh.axes) > 1) or axis != first:
        sizes = ", ".join(f"{each!r}: {size}" for each, size in mesh.placed.axes)
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} was asked for on the mesh {{{sizes}}}: the replicas must be one "
            f"axis, the first of the mesh. Name it, such as recipe={{{first!r}: {name!r}}}, or give the axes in "
            "another order."
        )
    rule, _, number = name.partition(":")
    if rule == SERVER:
        _check_worker(axis, name, mesh)
        return Meeting(axis, mesh.size, 1, SERVER, staleness=int(number))
    return Meeting(axis, dict(mesh.axes)[axis], int(number), rule)  # type: ignore[arg-type]


def _check_worker(axis: str, name: str, mesh: Mesh) -> None:
    """Raises RecipeError for replicas of several ranks that exchange with an asynchronous server."""
    if mesh.size > dict(mesh.axes)[axis]:
        raise RecipeError(
            f"The recipe {axis}:{name} was asked for on the mesh {mesh}: a replica that exchanges with an asynchronous "
            f"server is a single rank so far. Take a mesh of one axis, such as mesh={{{axis!r}: {mesh.size}}}, or "
            f"{axis}:geo:1, whose replicas wait for each other."
        )


def asks_for_replicas(recipe: RecipeLike) -> bool:
    """Whether a recipe asks for replicas, along whichever axis and on whichever mesh.

    >>> asks_for_replicas("far:diloco:10,dp:zero3"), asks_for_replicas("zero3")
    (True, False)
    """
    return bool(_meetings(recipe))


def _meetings(recipe: RecipeLike) -> dict[str, str]:
    """The recipes of replicas by their axes, of which "" is the one that is not named."""
    named = _parse(recipe)
    by_axis = {"": named} if isinstance(named, str) else named
    return {axis: name for axis, name in by_axis.items() if _is_meeting(name)}


def _is_meeting(name: object) -> bool:
    """Whether a recipe asks for replicas, such as `local:4`."""
    if not isinstance(name, str):
        return False
    rule, colon, steps = name.partition(":")
    return rule in RULES and bool(colon) and is_count(steps)


def _inside_replica(recipe: RecipeLike) -> RecipeLike:
    """The recipe of the axes inside a replica."""
    named = _parse(recipe)
    if isinstance(named, str):
        return "auto" if _is_meeting(named) else named
    inside = {axis: name for axis, name in named.items() if not _is_meeting(name)}
    return inside or "auto"


def _check_pipeline_recipe(name: object) -> None:
    if not isinstance(name, str) or name not in PIPELINE_RECIPES:
        raise RecipeError(
            f"There is no recipe {name!r} for the axis {PIPELINE_AXIS}{_near(str(name))}; choose among auto, "
            f"{', '.join(PIPELINE_RECIPES)}."
        )


def resolve(recipe: RecipeLike, mesh: Mesh) -> tuple[Recipe, ...]:
    """The row of the table for every axis of the mesh. Raises RecipeError for an unknown recipe or axis."""
    named = _parse(recipe)
    if isinstance(named, str) and named in SEVERAL_AXES:
        named = over_mesh(named, mesh.names)
    schedule, _ = split_recipe(recipe)
    if schedule:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} is for pipeline stages, but the mesh {mesh} has no axis "
            f"{PIPELINE_AXIS}; give it one, such as mesh={{'{PIPELINE_AXIS}': {mesh.sizes[0]}}}."
        )
    if isinstance(named, str):
        return tuple(_row(named) for _ in mesh.names)
    check_recipe_axes(recipe, mesh)
    rows = tuple(_row(named.get(axis, "auto"), axis) for axis in mesh.names)
    _check_reductions(rows, mesh)
    return rows


def check_recipe_axes(recipe: RecipeLike, mesh: Mesh) -> None:
    """Raises RecipeError if a recipe names an axis that the mesh does not have."""
    unknown = [axis for axis in recipe_axes(recipe) if axis not in mesh.names]
    if unknown:
        raise RecipeError(
            f"The recipe {format_recipe(recipe)!r} names the axis {unknown[0]!r}, but the mesh "
            f"{mesh} has {', '.join(mesh.names)}."
        )


def format_recipe(recipe: RecipeLike) -> str:
    """The text of a recipe, with aliases resolved; every function here that takes a recipe can read it."""
    named = _parse(recipe)
    if isinstance(named, str):
        whole = named in PIPELINE_RECIPES or named in SEVERAL_AXES or _is_meeting(named)
        return named if whole else _row(named).name
    return ",".join(
        f"{axis}:{name if axis == PIPELINE_AXIS or _is_meeting(name) else _row(name, axis).name}"
        for axis, name in named.items()
    )


def is_open(recipe: RecipeLike) -> bool:
    """Whether a recipe leaves everything on every axis to the search."""
    named = _parse(recipe)
    return set([named] if isinstance(named, str) else named.values()) <= {"auto"}


def recipe_axes(recipe: RecipeLike) -> tuple[str, ...]:
    """The axes that a recipe names; none if it is one recipe for all axes."""
    named = _parse(recipe)
    return () if isinstance(named, str) else tuple(named)


def _parse(recipe: RecipeLike) -> str | Mapping[str, str]:
    if isinstance(recipe, Mapping):
        return by_axis(recipe)
    if not isinstance(recipe, str):
        raise RecipeError(
            f"{recipe!r} is not a recipe; write one for all axes such as 'zero3', or one for each: "
            "{'dp': 'zero3', 'tp': 'tp'}. 'auto' leaves everything open."
        )
    if ":" not in recipe or _is_meeting(recipe.strip()):
        return recipe.strip()
    named: dict[str, str] = {}
    axes: list[str] = []  # those of the recipe that is being read
    for part in recipe.split(","):
        axis, colon, name = (piece.strip() for piece in part.partition(":"))
        axes.append(axis)
        if not axis or axis in named:
            raise _unreadable(part, recipe)
        if colon:
            _check_rule(part.strip(), axis, name)
            named[",".join(axes)] = name
            axes = []
    if axes:
        raise _unreadable(axes[0], recipe)
    return by_axis(named)


def _unreadable(part: str, recipe: str) -> RecipeError:
    return RecipeError(f"Cannot read {part!r} in the recipe {recipe!r}; write dp:zero3,tp:tp.")


def _check_rule(text: str, rule: str, steps: str) -> None:
    """Raises RecipeError for `rule:steps` where `rule` is one of replicas, and `steps` is not a recipe of an axis."""
    if rule not in RULES or steps in {*RECIPES, *ALIASES, *PIPELINE_RECIPES} or _is_meeting(steps):
        return
    if _is_meeting(text):
        raise RecipeError(
            f"{text!r} is given with the recipes of other axes, but not with the axis whose ranks are the replicas. "
            f"Write the first axis of the mesh before it: on the mesh dp=4,tp=2, dp:{text}."
        )
    further = " Other numbers of the outer optimizer stand in a plan (docs/replicas.md)."
    if rule == SERVER:
        raise RecipeError(
            f"Cannot read {text!r}: after '{rule}:' comes the number of exchanges that a replica may be ahead of the "
            f"slowest, but {steps!r} is not a whole number. Write {rule}:2, for example."
        )
    raise RecipeError(
        f"Cannot read {text!r}: after '{rule}:' comes the number of steps from one synchronisation of the replicas to "
        f"the next, but {steps!r} is not a whole number. Write {rule}:4, for example.{further if ':' in steps else ''}"
    )


def _row(name: str, axis: str = "") -> Recipe:
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if _is_meeting(name):
        raise RecipeError(
            f"The recipe {name!r} trains replicas that synchronise every K steps, which only autopar.compile and "
            "autopar.explain support. Choose another recipe here, such as ddp."
        )
    if not isinstance(name, str) or name not in RECIPES:
        rule, colon, steps = str(name).partition(":")
        if colon:
            _check_rule(str(name), rule, steps)
        known = ", ".join([*RECIPES, *(f"{a} (= {b})" for a, b in ALIASES.items())])
        known += f"; for several axes {', '.join(SEVERAL_AXES)}"
        known += f"; for the first axis of a mesh {', '.join(MEETING_RECIPES)}"
        known += f"; and for the axis {PIPELINE_AXIS} {', '.join(PIPELINE_RECIPES)}"
        asked = f"There is no recipe {name!r}" + (f" for the axis {axis!r}" if axis else "")
        asked += _near(str(name))
        if str(name).isdigit():
            known += (
                f". For replicas that synchronise every {name} steps write local:{name}, geo:{name} or diloco:{name}"
            )
        raise RecipeError(f"{asked}; choose among {known}.")
    return RECIPES[name]


def _near(name: str) -> str:
    """The recipes that are written almost like this, as a question; "" for none.

    >>> _near("zeroo3")
    ' (did you mean zero3?)'
    """
    known = [*RECIPES, *ALIASES, *SEVERAL_AXES, *PIPELINE_RECIPES]
    return did_you_mean(name, known, cutoff=0.75)


def _check_reductions(rows: Sequence[Recipe], mesh: Mesh) -> None:
    """Raises RecipeError if one axis reduces gradients once per step and another after each micro-batch."""
    stages = {row.stages: (row.name, axis) for row, axis in zip(rows, mesh.names, strict=True)}
    if (1,) in stages and (2,) in stages:
        (once, first), (often, second) = stages[(1,)], stages[(2,)]
        raise RecipeError(
            f"{once} on {first} reduces gradients once per step and {often} on "
            f"{second} per micro-batch, but a gradient is reduced over all axes at once; "
            "name the same recipe on both."
        )


def check_versions(schedule: str, inside: RecipeLike, mesh: Mesh) -> None:
    """Raises RecipeError unless ops use parameters in their stored layout, along every axis inside a stage.

    A schedule without a flush keeps several versions of the parameters. It does not support gathered copies of them.

    Args:
        schedule: name of a schedule without a flush.
        inside: recipe of the axes inside a stage.
        mesh: mesh of a stage.
    """
    for row, (axis, size) in zip(resolve(inside, mesh), mesh.axes, strict=True):
        if size > 1 and row.stages not in ((0,), (0, 3)):
            known = ", ".join(r.name for r in RECIPES.values() if r.stages in ((0,), (0, 3)))
            raise RecipeError(
                f"The schedule {schedule} keeps several versions of parameters, which so far must be stored in the "
                f"layout in which they are used, but the recipe of the axis {axis} is {row.name}. Name one among "
                f"{known}, such as recipe={{'{PIPELINE_AXIS}': {schedule!r}, {axis!r}: 'ddp'}}."
            )
