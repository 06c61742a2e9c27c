"""Finds plans: recipes and pins constrain, `fold` takes repetition out, `milp` decides one axis.

`search` is the whole of it; `search_mesh` also chooses the shape of the mesh.
"""

from autopar.search.fold import Fold, fold
from autopar.search.pins import Pins, resolve_pins
from autopar.search.recipes import ALIASES, RECIPES, Recipe, RecipeLike, format_recipe, resolve
from autopar.search.search import Found, search, search_mesh, search_with_cost

__all__ = [
    "ALIASES", "Fold", "Found", "Pins", "RECIPES", "Recipe", "RecipeLike", "fold", "format_recipe",
    "resolve", "resolve_pins", "search", "search_mesh", "search_with_cost",
]  # fmt: skip
