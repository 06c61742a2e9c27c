"""Bounds that end a search on one axis: none leaves out a faster plan."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest

from autopar.cost_model.machines.hardware import Host
from autopar.errors import SearchError
from autopar.ir import Graph
from autopar.search.exact.descent import least_seconds_within, smallest_fits
from autopar.search.exact.search import Found, MeshSearch
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from autopar.search.stages.pipeline import _Search
from autopar.search.stages.staged import SlowerError
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
def test_no_plan_within_a_bound_falls_below_the_least_seconds(graph: Graph) -> None:
    of_mesh = MeshSearch.of(graph, {"x": 2}, hardware=TOY)
    least = []
    for bound in bounds(of_mesh):
        found = seconds(of_mesh, bound)
        least.append(least_seconds_within(of_mesh.problem, bound))
        assert smallest_fits(of_mesh.problem, bound) == (found is not None)
        assert found is None or 0 < least[-1] <= found * (1 + 1e-9)
    assert least == sorted(least)


@pytest.mark.parametrize("graph", GRAPHS)
def test_only_slower_plans_are_known_between_the_least_seconds_and_a_plan(graph: Graph) -> None:
    of_mesh = MeshSearch.of(graph, {"x": 2}, hardware=TOY)
    *some, nothing = bounds(of_mesh)
    tight = min(bound for bound in some if seconds(of_mesh, bound))
    least = least_seconds_within(of_mesh.problem, tight)
    assert of_mesh.has_only_slower(tight, 0.999 * least)
    assert not of_mesh.has_only_slower(tight, 1.001 * least)
    assert not of_mesh.has_only_slower(nothing, 0.0)  # nothing fits, which is another answer


def test_on_several_axes_nothing_is_known_beforehand() -> None:
    of_mesh = MeshSearch.of(mlp(layers=2, batch=64), {"x": 2, "y": 2}, hardware=TOY)
    assert least_seconds_within(of_mesh.problem, 10**9) == 0.0


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


def test_layouts_that_are_known_to_be_slower_change_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a known plan is that of a little more memory, or of less."""
    graph = residual(6, Sizes(batch=16, width=64, hidden=256, vocab=64))
    asked = Request(WITH_HOST, mesh={"x": 2}, micro_batches=1)
    size = GivenMesh(Case(graph, asked)).search().price.peak_bytes
    left_out = []
    for part in (0.3, 0.5, 0.7, 0.9):
        for offload in (False, True):
            tight = asked.but(memory_bytes=int(part * size), offload=offload)
            best = planned(GivenMesh(Case(graph, tight)))
            for known in (0.9, 1.1):
                given = GivenMesh(Case(graph, tight), faster_than_seconds=known * (best or 1.0))
                found = planned(given)
                with monkeypatch.context() as patched:
                    patched.setattr(MeshSearch, "has_only_slower", lambda *_: False)
                    expected = planned(given)
                left_out.append(found != expected)
                is_slower = expected is None or expected >= given.faster_than_seconds
                assert found == expected or (found is None and is_slower)
    assert any(left_out)


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


def test_the_error_says_that_all_plans_are_slower() -> None:
    graph = residual(6, Sizes(batch=64, width=64, hidden=64, vocab=64))
    asked = Request(TOY, mesh={"x": 2}, micro_batches=1)
    size = GivenMesh(Case(graph, asked)).search().price.peak_bytes
    tight = asked.but(memory_bytes=int(0.99 * size))
    assert GivenMesh(Case(graph, tight)).search().price.peak_bytes <= 0.99 * size
    with pytest.raises(SlowerError, match=r"No plan on the mesh x=2 is faster than 1e-09 s\."):
        GivenMesh(Case(graph, tight), faster_than_seconds=1e-9).search()


def test_layouts_for_another_number_of_micro_batches_are_not_left_out() -> None:
    graph = residual(6, Sizes(batch=16, width=64, hidden=256, vocab=64))
    asked = Request(TOY, mesh={"pp": 1, "x": 2}, schedule="1f1b")
    for micro_batches in (None, 1):
        search = _Search(Case(graph, asked.but(micro_batches=micro_batches)), 1e-9)
        inside = search._inside(1)
        bound = int(inside.within(None).cost.memory_bytes)
        assert search._has_only_slower(inside, bound) == (micro_batches is not None)
