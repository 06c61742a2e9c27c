"""The errors of a search that has found no plan: one for all meshes that were tried, with what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from autopar.errors import AutoparError, MemoryBoundError, SearchError
from autopar.ir import Mesh
from autopar.search.request.recipe_rows import RecipeLike
from autopar.search.request.recipes import format_recipe, is_open, split_recipe
from autopar.search.request.request import Request
from autopar.units import counted, format_bytes

Refusal = tuple[Mesh, AutoparError]  # a mesh, and why it has no plan
_MOST_LISTED = 5  # meshes in one error


def words_of_reserved(request: Request, least_bytes: float = 0) -> str:
    """An error text for a memory bound that is no larger than the memory reserved on every rank; "" for any other.

    Args:
        request: what is asked.
        least_bytes: lower bound on what a rank needs under any plan; 0 where none is known.
    """
    bound, reserved_bytes = request.search_bound_bytes, request.hardware.reserved_bytes
    if bound is None or bound > reserved_bytes:
        return ""
    return (
        f"No plan fits into {format_bytes(bound)} of a rank: on {request.hardware.name} every rank has "
        f"{format_bytes(reserved_bytes)} reserved before any tensor, also with more ranks. What would help: "
        f"memory_bytes (--max-memory) above {max(reserved_bytes, math.ceil(least_bytes)):.0f}."
    )


def refusal_of_all(request: Request, refusals: Sequence[Refusal]) -> SearchError:
    """One error for all meshes that were tried.

    Where memory is missing, it lists what a rank needs on the meshes that need least, and has the error of the first
    of them. Otherwise it has a line for each reason.
    """
    head = f"No plan on {counted(request.ranks or 1, 'rank')}"
    lacking = [(mesh, error) for mesh, error in refusals if is_lack(error)]
    if not lacking:
        return SearchError("\n".join([f"{head}.", *_reasons(request, refusals)]))
    least: dict[Mesh, MemoryBoundError] = {}
    for mesh, error in sorted(lacking, key=lambda each: each[1].needed_bytes):
        least.setdefault(mesh, error)
    mesh, error = next(iter(least.items()))
    return MemoryBoundError.of(
        f"{head} fits into {format_bytes(request.bound_bytes)}: a rank needs {_listed(least)}.\n"
        f"On {mesh}: {error.finding}",
        error.remedies,
        error.needed_bytes,
    )


def is_lack(error: AutoparError) -> TypeGuard[MemoryBoundError]:
    """Whether an error says how much memory of a rank is missing."""
    return isinstance(error, MemoryBoundError) and error.needed_bytes > 0


def _listed(least: Mapping[Mesh, MemoryBoundError]) -> str:
    """The memory that a rank needs on the first of these meshes, in words."""
    needs = [f"{format_bytes(error.needed_bytes)} on {mesh}" for mesh, error in least.items()]
    hidden = len(needs) - _MOST_LISTED
    more = [f"more on {counted(hidden, 'other')}"] * (hidden > 0)
    return ", ".join([*needs[:_MOST_LISTED], *more])


def ruled_out(request: Request, what: str) -> str:
    """Sentences about what leaves nothing to choose: `--mesh dp=3 rule out every mesh. Drop one of them.`"""
    wishes = request.text
    return f"{wishes} rule out {what}. Drop one of them." if wishes else f"The model's sizes rule out {what}."


def _reasons(request: Request, refusals: Sequence[Refusal]) -> list[str]:
    """A line for each reason, with the first mesh that it rules out where there are several."""
    first: dict[str, Mesh] = {}
    for mesh, error in refusals:
        first.setdefault(str(error), mesh)
    lines = list(first) if len(first) == 1 else [f"{mesh}: {text}" for text, mesh in first.items()]
    hidden = len(lines) - _MOST_LISTED
    more = [f"And {counted(hidden, 'other reason')} on other meshes."] * (hidden > 0)
    nothing = ruled_out(request, "every mesh")
    return [*lines[:_MOST_LISTED], *more] or [nothing]


def with_recipe_open(error: MemoryBoundError, recipe: RecipeLike) -> MemoryBoundError:
    """The error with one more remedy: the recipe that the user names, if any, left to the search."""
    if is_open(split_recipe(recipe)[1]) or not error.needed_bytes:
        return error
    remedy = f'recipe="auto" instead of {format_recipe(recipe)!r}'
    return error.of(error.finding, (remedy, *error.remedies), error.needed_bytes)
