"""Two mesh axes in place of one: grouped-query attention on more ranks than key-value heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.ir import Graph, Mesh
from autopar.planning.planning import prepare_step
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.refined import Grouping, grouping_of, refine
from autopar.search.candidates.trials import Searched
from autopar.search.request.request import Request

WIDTH, SIZE = 64, 16


class Grouped(nn.Module):
    """Attention of 4 queries with `heads` keys and values, and a product that nothing else splits by four."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, heads * SIZE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@functools.cache
def graph(heads: int = 2) -> Graph:
    return prepare_step(Grouped(heads), (torch.randn(4, 16, WIDTH),)).analysis.graph


def found(**options: Any) -> Searched:
    return search_plan(graph(), Request(find_hardware("h100"), recompute="none", **options))


def test_the_sizes_of_grouped_queries() -> None:
    assert grouping_of(graph(2)) == Grouping(heads=2, queries=2)
    assert grouping_of(graph(1)) in (None, Grouping(heads=1, queries=4))
    assert grouping_of(graph(4)) is None  # a query for every key


@pytest.mark.parametrize(("ranks", "inner"), [(2, 1), (4, 1), (8, 2), (16, 4), (32, 1), (12, 1), (6, 1)])
def test_an_inner_axis_splits_the_queries_where_both_sizes_divide(ranks: int, inner: int) -> None:
    """4 heads of 4 queries: 8 ranks are 4 x 2 and 16 are 4 x 4; 12 are 4 x 3, and 3 does not divide 4."""
    assert Grouping(4, 4).inner_ranks(ranks) == inner


def test_a_refined_mesh_keeps_its_ranks_and_their_order() -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=8")
    assert str(refine(mesh, "tp", 4)) == "pp=2,dp=2,tp=2,tq=4"
    assert refine(mesh, "tp", 4).size == mesh.size


@pytest.mark.parametrize("recipe", ["tp", "tp+sp"])
def test_a_wider_axis_than_heads_is_two_and_as_fast_as_two_that_are_named(recipe: str) -> None:
    one = found(mesh={"tp": 4}, recipe=recipe).best
    two = found(mesh={"tp": 4}, recipe=recipe, refines=True).best
    named = found(mesh={"tp": 2, "tq": 2}, recipe=f"tp:{recipe},tq:{recipe}").best
    assert str(one.plan.mesh) == "tp=4" and str(two.plan.mesh) == "tp=2,tq=2"
    assert two.price == named.price and two.price.step_seconds < one.price.step_seconds
    assert two.plan.ops == named.plan.ops
    assert any("tp=4 is two axes, tp=2 for the 2 key-value heads" in n for n in two.plan.notes)


def test_the_open_search_on_a_mesh_is_no_slower_than_one_or_two_axes() -> None:
    best = found(mesh={"tp": 4}, refines=True).best.price.step_seconds
    one = found(mesh={"tp": 4}).best.price.step_seconds
    two = [
        found(mesh={"tp": 2, "tq": 2}, recipe=f"tp:{row},tq:{row}").best.price.step_seconds for row in ("tp", "tp+sp")
    ]
    assert best <= 1.001 * min(one, *two)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"tp": 4}, "recipe": "tp", "pins": {"out.bias": "R@tp"}},
        {"mesh": {"tp": 4}, "recipe": "zero3"},
        {"mesh": {"tp": 2}, "recipe": "tp"},
    ],
    ids=["pinned", "no tensor parallelism", "one axis splits the heads"],
)
def test_an_axis_that_is_pinned_or_needs_no_second_stays_one(options: dict[str, Any]) -> None:
    assert found(**options, refines=True).best.plan == found(**options).best.plan


def test_a_searched_mesh_may_have_two_axes() -> None:
    """Under tensor parallelism alone, the two axes split what one axis leaves whole."""
    best = found(ranks=4, stages=(1,), recipe="tp", batch=4).best
    assert str(best.plan.mesh) == "dp=1,tp=2,tq=2"
