"""A case: a captured model with the request for its plan. The searches of a plan each have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_model import Hardware
from autopar.errors import SearchError
from autopar.ir import Graph, Mesh, ParameterPlan
from autopar.ir.batches import captured_batch, sizes_of_micro_batches
from autopar.search.exact.question import LayoutQuestion
from autopar.search.exact.search import MeshSearch
from autopar.search.exact.searches import Searches
from autopar.search.request.recipe_rows import RecipeLike
from autopar.search.request.request import Request


@dataclass(frozen=True)
class Case:
    """A captured model with the request for its plan.

    Attributes:
        graph: the captured model, at the size of one captured batch.
        request: what the user asks for; the search decides what it leaves open.
        captured: number of captured batches that make up a step, if the request names no batch.
        fingerprint: hash of the captured graph, which the plan records.
        fixed_storage: layouts of parameters that are placed already, by name; None where they are open.
        searches: searches of layouts that were made for the model before.
    """

    graph: Graph
    request: Request
    captured: int = 1
    fingerprint: str = ""
    fixed_storage: Mapping[str, ParameterPlan] | None = None
    searches: Searches = field(default_factory=Searches)

    @property
    def rows(self) -> int:
        """Number of samples of a step."""
        return self.request.batch or captured_batch(self.graph) * self.captured

    def but(self, **changes: Any) -> Case:
        """The same case with some of the request changed."""
        return replace(self, request=self.request.but(**changes))

    def at(self, count: int) -> Case:
        """The same step in so many micro-batches, of which the graph is one, and the largest where they differ.

        Raises SearchError for more of them than rows.
        """
        if self.rows < count:
            raise SearchError(
                f"Of a batch of {self.rows} {count} micro-batches cannot each have a row; give at most {self.rows}."
            )
        largest, *_ = sizes_of_micro_batches(self.rows, count)
        return replace(self, graph=self.searches.with_batch(self.graph, largest), captured=count)

    def layouts(self, mesh: Mesh, recipe: RecipeLike, hardware: Hardware, micro_batches: int) -> MeshSearch:
        """The search of layouts on a mesh without stages, under a recipe for all of its axes."""
        request = self.request
        asked = LayoutQuestion(
            self.graph,
            mesh,
            hardware,
            recipe,
            request.pins,
            micro_batches,
            self.fingerprint,
            self.fixed_storage,
            software=request.software,
            training_state=request.training_state,
            tiers=request.tiers,
        )
        return self.searches.on(asked)
