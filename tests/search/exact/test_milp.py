"""The program of one axis against brute force over every plan of tiny graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.cost_model.flow import Flow
from autopar.errors import SearchError
from autopar.ir import Graph, Mesh, Plan
from autopar.search import search_with_cost
from autopar.search.exact.search import MeshSearch
from tests.search.graphs import Builder
from tests.search.toy import TOY, priced_plans
from tests.support.price_oracle import Cost
from tests.support.tables import often


def one_layer() -> Graph:
    """relu(x W) summed."""
    b = Builder({"b": 8, "k": 16, "j": 32}, itemsize_bytes=4)
    x, w = b.input("x", "b k"), b.parameter("w", "j k")
    y = b.op("linear", "b k, j k -> b j", [x, w], linear=[[0]])
    y = b.op("relu", "b j -> b j", [y], saves=[], saves_result=True)
    b.output(b.op("sum", "b j ->", [y], saves=[], linear=[[0]]))
    return b.graph()


def residual() -> Graph:
    """A value with two consumers, one of them a view, and a parameter used twice; two ranks do not divide `e`."""
    b = Builder({"b": 4, "h": 2, "e": 3}, itemsize_bytes=4)
    x, w = b.input("x", "b (h e)"), b.parameter("w", "h e")
    y = b.op("mul", "b (h e), h e -> b (h e)", [x, w], linear=[[0]])
    z = b.op("view", "b (h e) -> b h e", [y], view=True, linear=[[0]])
    z = b.op("mul", "b h e, h e -> b h e", [z, w], linear=[[0]])
    b.output(b.op("dot", "b (h e), b h e ->", [y, z]))
    return b.graph()


def chain_of_views() -> Graph:
    """linear -> view -> view -> square: both views collapse; two ranks do not divide `k`."""
    b = Builder({"b": 4, "k": 7, "h": 4, "e": 2}, itemsize_bytes=4)
    x, w = b.input("x", "b k"), b.parameter("w", "(h e) k")
    y = b.op("linear", "b k, (h e) k -> b (h e)", [x, w], linear=[[0]])
    y = b.op("view", "b (h e) -> b h e", [y], view=True, linear=[[0]])
    y = b.op("view", "b h e -> h b e", [y], view=True, linear=[[0]])
    b.output(b.op("square", "h b e -> h b e", [y]))
    return b.graph()


def whole_result() -> Graph:
    """Its result is asked for whole, on every rank."""
    return replace(chain_of_views(), whole_outputs=True)


GRAPHS = {"one layer": one_layer, "residual": residual, "chain of views": chain_of_views, "whole result": whole_result}


@functools.cache
def all_priced(name: str, micro_batches: int) -> list[tuple[Plan, Cost]]:
    """Every plan on two ranks: thousands, priced once for the tests that look for the best of them."""
    return priced_plans(GRAPHS[name](), 2, micro_batches)


@pytest.fixture(scope="module", params=GRAPHS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A graph's name, after whose tests those of the next come: a worker prices the plans of few graphs."""
    yield request.param
    all_priced.cache_clear()


# A batch in parts does all that a whole one does.
@pytest.mark.parametrize("micro_batches", often((1, 3), {3}))
def test_the_optimum_is_that_of_brute_force(name: str, micro_batches: int) -> None:
    graph = GRAPHS[name]()
    best = min(cost.seconds for _, cost in all_priced(name, micro_batches))
    found = search_with_cost(graph, {"x": 2}, hardware=TOY, micro_batches=micro_batches)
    assert found.cost.seconds == pytest.approx(best, rel=1e-9)


def test_a_result_that_is_delivered_whole_is_paid_for() -> None:
    graph = chain_of_views()
    free = {str(plan): cost for plan, cost in all_priced("chain of views", 3)}
    for plan, cost in all_priced("whole result", 3):
        dear = cost.seconds > free[str(plan)].seconds
        layout = Flow(graph, plan).produced[graph.outputs[0]]
        assert dear == (layout[0].kind == "S"), plan


def test_the_optimum_under_any_memory_bound_is_that_of_brute_force(name: str) -> None:
    graph = GRAPHS[name]()
    plans = all_priced(name, 3)
    sizes = sorted({cost.memory_bytes for _, cost in plans})
    for bound in sizes[:: max(1, len(sizes) // 6)]:
        best = min(cost.seconds for _, cost in plans if cost.memory_bytes <= bound)
        found = search_with_cost(graph, {"x": 2}, hardware=TOY, micro_batches=3, memory_bytes=bound)
        assert found.cost.memory_bytes <= bound
        assert found.cost.seconds == pytest.approx(best, rel=1e-9)


def test_the_optimum_with_a_price_of_memory_is_that_of_brute_force(name: str) -> None:
    """From a price that hardly matters to one at which the smallest plan is the best."""
    plans = all_priced(name, 3)
    search = MeshSearch.of(GRAPHS[name](), Mesh.of({"x": 2}), hardware=TOY, micro_batches=3)
    for byte_seconds in (1e-12, 1e-9, 1e-8, 1e-3):
        best = min(cost.seconds + byte_seconds * cost.memory_bytes for _, cost in plans)
        cost = search.at_price(byte_seconds).cost
        assert cost.seconds + byte_seconds * cost.memory_bytes == pytest.approx(best, rel=1e-9)


def test_below_the_smallest_plan_the_error_names_it(name: str) -> None:
    graph = GRAPHS[name]()
    smallest = min(cost.memory_bytes for _, cost in all_priced(name, 3))
    with pytest.raises(SearchError, match=rf"memory_bytes={smallest} \(--max-memory\) if a rank has"):
        search_with_cost(graph, {"x": 2}, hardware=TOY, micro_batches=3, memory_bytes=smallest - 1)
