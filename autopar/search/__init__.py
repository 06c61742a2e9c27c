"""Finds plans: recipes and pins constrain, `fold` takes repetition out, `milp` decides one axis.

`search` is the whole of it; `search_mesh` also chooses the shape of the mesh. Around them
`pipeline.search_pipeline` chooses the stages and the schedule, `pipeline.search_pipeline_mesh` the depth.
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
from autopar.search.search import Found, search, search_mesh, search_with_cost

__all__ = [
    "ALIASES", "Fold", "Found", "PIPELINE_RECIPES", "Pins", "RECIPES", "Recipe",
    "RecipeLike", "fold", "format_recipe", "resolve", "resolve_pins", "search", "search_mesh",
    "search_with_cost", "split_recipe",
]  # fmt: skip
