"""The searches on single meshes that one question needs; equal ones are made once.

A mesh is searched without recomputation, with it, and under recipes. Many of these searches ask for the same layouts
under other bounds on memory, so that they share solved programs (`autopar.search.exact.search.MeshSearch`). Those that
differ in the recipe or in the tiers of parameters alone share the folded graph and its prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir import Graph
from autopar.ir.batches import captured_batch, with_batch
from autopar.search.exact.question import LayoutQuestion
from autopar.search.exact.search import MeshSearch
from autopar.search.request.recipes import format_recipe


@dataclass(frozen=True)
class Searches:
    """Searches by their questions."""

    _known: dict[object, MeshSearch] = field(default_factory=dict)
    _graphs: dict[tuple[int, int], tuple[Graph, Graph]] = field(default_factory=dict)

    def on(self, asked: LayoutQuestion) -> MeshSearch:
        """The search that answers a question; the same object for equal ones. Errors are those of `search`.

        Graphs and placed parameters are compared by identity, everything else by value. Every search keeps its graph
        and layouts, so that ids stay unique.
        """
        pins = tuple(sorted((asked.pins or {}).items()))
        placed = id(asked.graph), id(asked.fixed_storage or None)
        figures = asked.hardware, asked.software, asked.training_state, asked.micro_batches, asked.bucket_bytes
        priced = placed, asked.mesh, pins, figures, asked.fingerprint, asked.repeats
        key = priced, format_recipe(asked.recipe), tuple(asked.tiers)
        if key not in self._known:
            alike = self._known.get(priced)
            found = alike.under(asked.recipe, asked.tiers) if alike else MeshSearch.answering(asked)
            self._known[key] = found
            self._known.setdefault(priced, found)
        return self._known[key]

    def with_batch(self, graph: Graph, rows: int) -> Graph:
        """The graph with this number of rows; the same object for equal arguments, so that searches are the same."""
        if rows == captured_batch(graph):
            return graph
        key = (id(graph), rows)
        if key not in self._graphs:
            self._graphs[key] = graph, with_batch(graph, rows)
        return self._graphs[key][1]
