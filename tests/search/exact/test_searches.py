"""Equal questions on one mesh share a search, and different ones do not; recipes share a folded graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.machines.hardware import Host
from autopar.ir import UNSPLIT, Graph, Mesh
from autopar.search import search
from autopar.search.exact.axis import AxisSolutions
from autopar.search.exact.decisions import Assignment
from autopar.search.exact.milp import AxisProgram
from autopar.search.exact.question import LayoutQuestion
from autopar.search.exact.search import MeshSearch
from autopar.search.exact.searches import Searches
from autopar.search.request.recipe_rows import ON_DEVICE, Tiering
from tests.search.graphs import LlamaSizes, llama, mlp
from tests.search.toy import TOY

GRAPH = llama(LlamaSizes(batch=8, seq=16, layers=1, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=64))
MESH = Mesh.of({"dp": 2, "tp": 2})


def test_equal_questions_share_a_search() -> None:
    searches = Searches()
    asked = searches.on(LayoutQuestion(GRAPH, MESH, TOY, recipe="dp:zero3,tp:tp"))
    again = searches.on(LayoutQuestion(GRAPH, MESH, TOY, recipe={"dp": "zero3", "tp": "tp"}, pins={}))
    assert again is asked
    for other in (
        searches.on(LayoutQuestion(GRAPH, MESH, TOY)),
        searches.on(LayoutQuestion(GRAPH, MESH, TOY, recipe="dp:zero3,tp:tp", micro_batches=2)),
        searches.on(LayoutQuestion(GRAPH, Mesh.of({"dp": 4, "tp": 1}), TOY, recipe="dp:zero3,tp:tp")),
    ):
        assert other is not asked


def test_a_search_under_a_recipe_finds_the_plan_of_a_search_with_it() -> None:
    shared = MeshSearch.of(GRAPH, MESH, hardware=TOY)
    for recipe in ("dp:ddp,tp:tp", "dp:zero3,tp:tp+sp"):
        expected = search(GRAPH, MESH, hardware=TOY, recipe=recipe)
        assert shared.under(recipe).within(None).plan == expected


@pytest.mark.parametrize(
    "graph", [pytest.param(mlp(layers=2, batch=64), id="mlp"), pytest.param(GRAPH, id="llama", marks=pytest.mark.slow)]
)
def test_questions_that_differ_in_recipe_and_tiers_share_prices_and_no_plan(graph: Graph) -> None:
    searches, host = Searches(), Host(10**9, 1e9, 1e-6, 1e9)
    hardware = replace(TOY, host=host)
    far = Tiering("host", "device")
    asked = [("auto", (ON_DEVICE,)), ("dp:zero3", (ON_DEVICE,)), ("auto", (ON_DEVICE, far))]
    found = [searches.on(LayoutQuestion(graph, MESH, hardware, recipe=r, tiers=t)) for r, t in asked]
    assert len({id(each.problem.prices) for each in found}) == 1
    bound = found[0].smallest().cost.memory_bytes
    for each, (recipe, tiers) in zip(found, asked, strict=True):
        alone = MeshSearch.of(graph, MESH, hardware=hardware, recipe=recipe, tiers=tiers)
        assert each.within(None).plan == alone.within(None).plan
        assert each.within(int(2 * bound)).plan == alone.within(int(2 * bound)).plan


def test_a_bound_below_an_impossible_one_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, solve = [], AxisProgram.solve

    def counted(self: AxisProgram, **options: float) -> object:
        solved.append(options)
        return solve(self, **options)

    monkeypatch.setattr(AxisProgram, "solve", counted)
    problem = MeshSearch.of(GRAPH, Mesh.of({"dp": 2}), hardware=TOY).problem
    unsplit = Assignment(tuple((UNSPLIT,) for _ in problem.ops), {}, {})
    solutions = AxisSolutions.of(problem, 0, unsplit)
    assert solutions.within(2.0) is solutions.within(1.0) is solutions.smallest
    assert solved == [{"minimize": "bytes"}]  # the one of least memory takes more than both
