"""Bounds on memory that are known before a search: no plan takes less, and hopeless searches are spared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import SearchError, StateError
from autopar.ir import Mesh
from autopar.search.exact.least_memory import least_bytes
from autopar.search.exact.search import Found, MeshSearch
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from autopar.search.stages.staged import SlowerError
from tests.search.graphs import Builder, LlamaSizes, llama
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

SMALL = LlamaSizes(batch=8, seq=16, layers=2, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)
MESH = {"x": 2, "y": 2}


def search_of() -> MeshSearch:
    return MeshSearch.of(llama(SMALL), MESH, hardware=TOY)


def test_no_plan_takes_less_than_the_bound() -> None:
    found = search_of()
    least = least_bytes(found.problem, may_offload=False)
    assert 0 < least_bytes(found.problem, may_offload=True) <= least
    assert least <= found.smallest().cost.memory_bytes


def test_a_converted_view_frees_the_memory_around_it() -> None:
    """A head over 2 of 64 features of a frozen model saves these alone if it splits them."""
    b = Builder({"b": 64, "d": 64, "e": 2, "f": 2}, {"b": "batch", "d": "parameter"}, itemsize_bytes=4)
    frozen = b.parameter("frozen", "d", needs_grad=False)
    y = b.op("mul", "b d, d -> b d", [b.input("x", "b d"), frozen])
    y = b.op("narrow", "b d! -> b e!", [y], saves=[], linear=[[0]], view=True)
    y = b.op("linear", "b e, f e -> b f", [y, b.parameter("head", "f e")], linear=[[0]])
    b.output(b.op("sum", "b f ->", [y], saves=[], linear=[[0]]))
    found = MeshSearch.of(b.graph(), {"x": 2}, hardware=TOY)
    smallest = found.smallest().cost.memory_bytes
    assert found.problem.least_bytes <= smallest
    assert least_bytes(found.problem, may_offload=False) <= smallest


@pytest.mark.parametrize(("part", "is_hopeless"), [(0.99, True), (1.01, False)])
def test_a_mesh_is_hopeless_below_the_bound_alone(part: float, is_hopeless: bool) -> None:
    bound = int(part * least_bytes(search_of().problem, may_offload=False))
    request = Request(replace(TOY, memory_bytes=bound), mesh=MESH, memory_bytes=bound)
    given = GivenMesh(Case(llama(SMALL), request))
    assert given.cannot_fit == is_hopeless
    if is_hopeless:
        with pytest.raises(SearchError):
            given.search()


def test_a_mesh_that_is_hopeless_on_the_device_is_not_with_activations_on_the_host() -> None:
    bound = int(0.999 * least_bytes(search_of().problem, may_offload=False))
    request = Request(replace(TOY, memory_bytes=bound), mesh=Mesh.of(MESH), memory_bytes=bound)
    given = GivenMesh(Case(llama(SMALL), request))
    assert given.cannot_fit
    assert not GivenMesh(given.case.but(recompute="offloaded")).cannot_fit


def test_what_has_to_recompute_is_not_searched_without(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = residual(4, Sizes(batch=512))
    whole = MeshSearch.of(graph, {"x": 2}, hardware=TOY)
    bound, within = int(0.95 * whole.problem.least_bytes), MeshSearch.within
    asked = list[int | None]()

    def noted(search: MeshSearch, memory_bytes: int | None) -> Found:
        asked.append(memory_bytes)
        return within(search, memory_bytes)

    monkeypatch.setattr(MeshSearch, "within", noted)
    request = Request(TOY, mesh={"x": 2}, memory_bytes=bound)
    found = GivenMesh(Case(graph, request)).search()
    assert found.plan.recompute != "none" and found.price.peak_bytes <= bound
    assert asked and bound not in asked
    with pytest.raises(SlowerError):  # it fits, so that memory is not what it lacks
        GivenMesh(Case(graph, request), faster_than_seconds=found.price.step_seconds / 2).search()


@pytest.mark.parametrize("part", [0.1, 0.9, 1.1])
def test_what_a_search_says_before_it_says_with_its_error(part: float) -> None:
    """A bound that states alone exceed has an error of its own kind."""
    search = search_of()
    bound = int(part * search.problem.least_state_bytes)
    assert search.exceeds(bound)
    with pytest.raises(SearchError) as caught:
        search.within(bound)
    assert isinstance(caught.value, StateError) == search.state_exceeds(bound) == (part < 1)
