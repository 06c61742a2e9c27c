"""The searches on single meshes that one question needs; equal ones are made once.

A mesh is searched without recomputation, with it, and under recipes. Many of these searches ask for the same layouts
under other bounds on memory, so that they share solved programs (`autopar.search.search.MeshSearch`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from autopar.cost_model import Hardware
from autopar.ir import Graph, Mesh
from autopar.search.recipes import format_recipe
from autopar.search.search import Choices, MeshSearch


@dataclass(frozen=True)
class Searches:
    """Searches by what they were asked for: graph, mesh, hardware and choices."""

    _known: list[tuple[tuple[object, ...], MeshSearch]] = field(default_factory=list)

    def on(
        self, graph: Graph, mesh: Mesh, *, hardware: Hardware, **choices: Unpack[Choices]
    ) -> MeshSearch:
        """The search on a mesh; the same object for equal arguments. Arguments and errors are those of `search`.

        Graphs and placed parameters are compared by identity, everything else by value.
        """
        asked = _asked(graph, mesh, hardware, choices)
        known = next((search for key, search in self._known if key == asked), None)
        if known is None:
            known = MeshSearch.of(graph, mesh, hardware=hardware, **choices)
            self._known.append((asked, known))
        return known


def _asked(graph: Graph, mesh: Mesh, hardware: Hardware, choices: Choices) -> tuple[object, ...]:
    """A key that is equal for equal searches; every search keeps its graph and layouts, so that ids stay unique."""
    by_value = dict(choices)
    placed = by_value.pop("fixed_storage", None)
    by_value["recipe"] = format_recipe(choices.get("recipe", "auto"))
    by_value["pins"] = dict(choices.get("pins") or {})
    return id(graph), id(placed) if placed else None, mesh, hardware, by_value
