"""Finds plans: recipes and pins constrain, `fold` takes repetition out, `milp` decides one axis.

`search` is the whole of it for a mesh without stages. Around it `pipeline.search_pipeline` chooses stages and
schedule, and `outer.search_plan` the mesh, the depth and the micro-batches.
"""

from autopar.search.fold import Fold, fold
from autopar.search.pins import Pins, resolve_pins
from autopar.search.recipes import (
    ALIASES,
    PIPELINE_RECIPES,
    RECIPES,
    Recipe,
    RecipeLike,
    format_recipe,
    resolve,
    split_recipe,
)
from autopar.search.search import Found, search, search_with_cost

__all__ = [
    "ALIASES", "Fold", "Found", "PIPELINE_RECIPES", "Pins", "RECIPES", "Recipe",
    "RecipeLike", "fold", "format_recipe", "resolve", "resolve_pins", "search", "search_with_cost", "split_recipe",
]  # fmt: skip
