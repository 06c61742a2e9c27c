"""A search that is asked for one bound after another answers as if each bound were its first."""

from __future__ import annotations

import functools

import pytest

from autopar.errors import SearchError
from autopar.ir import Graph, Plan
from autopar.search import search
from autopar.search.exact.search import MeshSearch
from tests.search.graphs import LlamaSizes, llama, mlp
from tests.search.toy import TOY

SMALL = LlamaSizes(batch=8, seq=16, layers=1, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)
MESH = {"x": 2, "y": 2}


def plan_or_error(found: MeshSearch, bound: int | None) -> Plan | str:
    try:
        return found.within(bound).plan
    except SearchError as error:
        return str(error)


def alone(graph: Graph, bound: int | None) -> Plan | str:
    try:
        return search(graph, MESH, hardware=TOY, memory_bytes=bound)
    except SearchError as error:
        return str(error)


@pytest.mark.parametrize(
    "graph",
    [pytest.param(mlp(layers=2, batch=64), id="mlp"), pytest.param(llama(SMALL), id="llama", marks=pytest.mark.slow)],
)
def test_what_one_bound_taught_changes_no_answer_to_another(graph: Graph) -> None:
    unbounded = MeshSearch.of(graph, MESH, hardware=TOY)
    size = unbounded.within(None).cost.memory_bytes
    bounds = [None, int(0.9 * size), size // 10]
    expected = {bound: alone(graph, bound) for bound in bounds}
    assert isinstance(expected[bounds[1]], Plan) and isinstance(expected[size // 10], str)
    for order in (bounds, bounds[::-1]):
        shared = MeshSearch.of(graph, MESH, hardware=TOY)
        assert {bound: plan_or_error(shared, bound) for bound in order} == expected


@functools.cache
def shared() -> MeshSearch:
    """One search for all bounds."""
    return MeshSearch.of(llama(SMALL), MESH, hardware=TOY)


@pytest.mark.parametrize(("part", "is_tight"), [(2.0, False), (1.0, False), (0.9, True)])
def test_memory_is_tight_only_where_something_faster_was_refused(part: float, is_tight: bool) -> None:
    of_mesh = shared()
    loose = of_mesh.within(None).cost
    assert of_mesh.within(int(part * loose.memory_bytes)).is_tight == is_tight
