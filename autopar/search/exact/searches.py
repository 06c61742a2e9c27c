"""The searches on single meshes that one question needs; equal ones are made once.

A mesh is searched without recomputation, with it, and under recipes. Many of these searches ask for the same layouts
under other bounds on memory, so that they share solved programs (`autopar.search.exact.search.MeshSearch`). Those that
differ in the recipe or in the tiers of parameters alone share the folded graph and its prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Unpack

from autopar.cost_model import Hardware
from autopar.ir import Graph, Mesh
from autopar.ir.batches import captured_batch, with_batch
from autopar.search.exact.search import Choices, MeshSearch
from autopar.search.request.recipe_rows import ON_DEVICE
from autopar.search.request.recipes import format_recipe


@dataclass(frozen=True)
class Searches:
    """Searches by their arguments: graph, mesh, hardware and choices."""

    _known: list[tuple[_Question, MeshSearch]] = field(default_factory=list)
    _graphs: dict[tuple[int, int], tuple[Graph, Graph]] = field(default_factory=dict)

    def on(self, graph: Graph, mesh: Mesh, *, hardware: Hardware, **choices: Unpack[Choices]) -> MeshSearch:
        """The search on a mesh; the same object for equal arguments. Arguments and errors are those of `search`.

        Graphs and placed parameters are compared by identity, everything else by value.
        """
        asked = _asked(graph, mesh, hardware, choices)
        known = next((search for key, search in self._known if key == asked), None)
        if known is None:
            alike = next((s for key, s in self._known if key.priced == asked.priced), None)
            if alike is None:
                known = MeshSearch.of(graph, mesh, hardware=hardware, **choices)
            else:
                tiers = choices.get("tiers", (ON_DEVICE,))
                known = alike.under(choices.get("recipe", "auto"), tiers)
            self._known.append((asked, known))
        return known

    def with_batch(self, graph: Graph, rows: int) -> Graph:
        """The graph with this number of rows; the same object for equal arguments, so that searches are the same."""
        if rows == captured_batch(graph):
            return graph
        key = (id(graph), rows)
        if key not in self._graphs:
            self._graphs[key] = graph, with_batch(graph, rows)
        return self._graphs[key][1]


class _Question(NamedTuple):
    """A key that is equal for equal searches; every search keeps its graph and layouts, so that ids stay unique.

    Attributes:
        priced: everything that prices depend on.
        recipe: the recipe, as text.
        tiers: memories in which parameters may be.
    """

    priced: tuple[object, ...]
    recipe: str
    tiers: object


def _asked(graph: Graph, mesh: Mesh, hardware: Hardware, choices: Choices) -> _Question:
    by_value: dict[str, object] = dict(choices)
    placed = by_value.pop("fixed_storage", None)
    recipe = format_recipe(choices.get("recipe", "auto"))
    by_value.pop("recipe", None)
    tiers = by_value.pop("tiers", (ON_DEVICE,))
    by_value["pins"] = dict(choices.get("pins") or {})
    priced = (id(graph), id(placed) if placed else None, mesh, hardware, by_value)
    return _Question(priced, recipe, tiers)
