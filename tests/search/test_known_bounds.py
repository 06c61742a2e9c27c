"""Bounds that end a search: none leaves out a faster plan."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest

from autopar.cost_model.machines.hardware import Host
from autopar.errors import SearchError
from autopar.ir import Graph
from autopar.search.exact.search import Found, MeshSearch
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from tests.search.graphs import LlamaSizes, llama, mlp
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

descent = importlib.import_module("autopar.search.exact.descent")

SMALL = LlamaSizes(batch=8, seq=16, layers=1, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)
HOST = Host(10**9, 1e9, 1e-6, 1e9)
WITH_HOST = dataclasses.replace(TOY, host=HOST)
GRAPHS = [pytest.param(mlp(layers=2, batch=64), id="mlp"), pytest.param(llama(SMALL), id="llama")]


def bounds(of_mesh: MeshSearch) -> Iterator[int]:
    """Bounds from the memory of the fastest plan down to one that nothing fits into."""
    size = of_mesh.within(None).cost.memory_bytes
    return (int(part * size) for part in (1.0, 0.95, 0.9, 0.8, 0.7, 0.1))


def seconds(of_mesh: MeshSearch, bound: int) -> float | None:
    """Seconds of the plan within a bound; None if none fits."""
    try:
        return of_mesh.within(bound).cost.seconds
    except SearchError:
        return None


@pytest.mark.parametrize("graph", GRAPHS)
def test_where_a_first_plan_is_proven_no_other_start_leads_to_a_faster_one(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = MeshSearch.of(graph, {"x": 2}, hardware=TOY)
    many = MeshSearch.of(graph, {"x": 2}, hardware=TOY)
    proven = []
    for bound in bounds(few):
        found = seconds(few, bound)
        with monkeypatch.context() as patched:
            patched.setattr(descent, "_is_proven", lambda *_: False)
            expected = seconds(many, bound)
        assert found == pytest.approx(expected, rel=2e-4) if expected else found is None
        proven.append(bool(found) and len(few.within(bound).descents) == 1)
    assert any(proven)


def test_a_recipe_that_splits_nothing_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a mixture that the ranks do not divide, say: other recipes have plans."""
    graph = residual(6, Sizes(batch=16, width=64, hidden=256, vocab=64))
    asked = Request(WITH_HOST, mesh={"x": 2}, micro_batches=1, offload=True, streams=True)
    size = GivenMesh(Case(graph, asked)).search().price.peak_bytes
    given = GivenMesh(Case(graph, asked.but(recompute="full", memory_bytes=int(0.3 * size))))
    expected, smallest, refused = planned(given), MeshSearch.smallest, []

    def refusing(search: MeshSearch) -> Found:
        if all(recipe.may is not None for recipe in search.problem.recipes):
            refused.append(search.problem.recipes)
            raise SearchError("The recipe splits nothing along x=2")
        return smallest(search)

    monkeypatch.setattr(MeshSearch, "smallest", refusing)
    assert planned(given) == expected and expected is not None
    assert refused


def planned(given: GivenMesh) -> float | None:
    """Seconds of the plan for a given mesh; None if there is none, or none that is faster."""
    try:
        return given.search().price.step_seconds
    except SearchError:
        return None
