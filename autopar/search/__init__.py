"""Finds plans.

For a mesh without pipeline stages, `search` finds the fastest plan: `recipes` and `pins` constrain it, `fold` joins
repeated layers, and `milp` decides the choices along one axis. `pipeline.search_pipeline` calls it and chooses stages
and schedule. `outer.search_plan` calls both and chooses the mesh, the number of stages and the micro-batches.

Its folders, each of which imports only those to its left:

    request < exact < stages < refine < candidates
"""

from autopar.search.exact.fold import fold
from autopar.search.exact.search import search, search_with_cost
from autopar.search.request.recipe_rows import RECIPES, RecipeLike
from autopar.search.request.recipes import format_recipe, resolve
