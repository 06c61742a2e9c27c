"""The searches on single meshes that one question needs; equal ones are made once.

A mesh is searched without recomputation, with it, and under recipes. Many of these searches ask for the same layouts
under other bounds on memory, so that they share solved programs (`autopar.search.exact.search.MeshSearch`). Those that
differ in the recipe or in the tiers of parameters alone share the folded graph and its prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from autopar.cost_model import Hardware
from autopar.ir import Graph, Mesh
from autopar.ir.batches import captured_batch, with_batch
from autopar.search.exact.search import Choices, MeshSearch
from autopar.search.request.recipe_rows import ON_DEVICE
from autopar.search.request.recipes import format_recipe


@dataclass(frozen=True)
class Searches:
    """Searches by their arguments: graph, mesh, hardware and choices."""

    _known: dict[object, MeshSearch] = field(default_factory=dict)
    _graphs: dict[tuple[int, int], tuple[Graph, Graph]] = field(default_factory=dict)

    def on(self, graph: Graph, mesh: Mesh, *, hardware: Hardware, **choices: Unpack[Choices]) -> MeshSearch:
        """The search on a mesh; the same object for equal arguments. Arguments and errors are those of `search`.

        Graphs and placed parameters are compared by identity, everything else by value. Every search keeps its graph
        and layouts, so that ids stay unique.
        """
        recipe, tiers = choices.get("recipe", "auto"), choices.get("tiers", (ON_DEVICE,))
        by_value = {**choices, "recipe": "", "tiers": (), "pins": tuple(sorted((choices.get("pins") or {}).items()))}
        by_value["fixed_storage"] = id(choices.get("fixed_storage") or None)
        priced = id(graph), mesh, hardware, tuple(sorted(by_value.items()))
        asked = priced, format_recipe(recipe), tuple(tiers)
        if asked not in self._known:
            alike = self._known.get(priced)
            found = alike.under(recipe, tiers) if alike else MeshSearch.of(graph, mesh, hardware=hardware, **choices)
            self._known[asked] = found
            self._known.setdefault(priced, found)
        return self._known[asked]

    def with_batch(self, graph: Graph, rows: int) -> Graph:
        """The graph with this number of rows; the same object for equal arguments, so that searches are the same."""
        if rows == captured_batch(graph):
            return graph
        key = (id(graph), rows)
        if key not in self._graphs:
            self._graphs[key] = graph, with_batch(graph, rows)
        return self._graphs[key][1]
