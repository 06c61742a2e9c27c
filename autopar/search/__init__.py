"""Finds plans.

For a mesh without pipeline stages, `search` finds the fastest plan: `recipes` and `pins` constrain it, `fold` joins
repeated layers, and `milp` decides the choices along one axis. `pipeline.search_pipeline` calls it and chooses stages
and schedule. `outer.search_plan` calls both and chooses the mesh, the number of stages and the micro-batches.

Its folders, each of which imports only those to its left:

    request < exact < stages < refine < candidates
"""

from autopar.search.exact.fold import Fold, fold
from autopar.search.exact.search import Found, search, search_with_cost
from autopar.search.request.pins import Pins, resolve_pins
from autopar.search.request.recipe_rows import (
    ALIASES,
    PIPELINE_RECIPES,
    RECIPES,
    Recipe,
    RecipeLike,
)
from autopar.search.request.recipes import format_recipe, resolve, split_recipe

__all__ = [
    "ALIASES",
    "Fold",
    "Found",
    "PIPELINE_RECIPES",
    "Pins",
    "RECIPES",
    "Recipe",
    "RecipeLike",
    "fold",
    "format_recipe",
    "resolve",
    "resolve_pins",
    "search",
    "search_with_cost",
    "split_recipe",
]
