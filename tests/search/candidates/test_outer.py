"""The outer search: mesh, depth and micro-batches, against every setting searched alone."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import AutoparError, SearchError
from autopar.ir import Mesh, with_pipeline
from autopar.ir.batches import captured_batch
from autopar.ir.note import kind_of
from autopar.pipeline.composed import composed
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.trials import Searched, depths_of
from autopar.search.exact.search import meshes_of
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.given import GivenMesh
from tests.search.graphs import LlamaSizes, llama, mlp
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

GRAPH = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
SMALL = LlamaSizes(batch=4, seq=8, layers=1, dim=16, kv_heads=2, group=2, head_dim=4, ffn=32, vocab=64)


@functools.cache
def found(captured_micro_batches: int = 1, **options: Any) -> Searched:
    request = Request(TOY, **{"ranks": 4, **options})
    return search_plan(GRAPH, request, captured_micro_batches=captured_micro_batches)


def alone(mesh: Mesh, micro_batches: int, **options: Any) -> float:
    """Seconds of the best plan on one mesh with 8 x 4 rows in so many micro-batches; inf for none."""
    request = Request(TOY, mesh=mesh, micro_batches=micro_batches, **options)
    try:
        return search_plan(GRAPH, request.but(batch=32)).best.price.step_seconds
    except AutoparError:
        return float("inf")


def test_no_mesh_depth_or_number_of_micro_batches_is_faster() -> None:
    best = found(batch=32, cuts_batch=True).best
    every = {
        (str(mesh), count): alone(mesh, count)
        for depth in (1, 2, 4)
        for inside in meshes_of(4 // depth)
        for mesh in [with_pipeline(inside, depth, 0) if depth > 1 else inside]
        for count in (1, 2, 4, 8, 16, 32)
    }
    assert best.price.step_seconds <= min(every.values()) * 1.001, min(every, key=every.__getitem__)


@pytest.mark.parametrize("options", [{"mesh": Mesh.of({"dp": 2})}, {"mesh": Mesh.parse("pp=2")}, {"ranks": 4}], ids=str)
def test_four_micro_batches_of_30_rows_cost_what_the_largest_does(options: dict[str, Any]) -> None:
    """They lie between those of 28 and of 32 rows, in seconds and in bytes; the plan is one of 8 rows."""
    less, unequal, more = (
        search_plan(GRAPH, Request(TOY, batch=rows, micro_batches=4, cuts_batch=True, **options)).best
        for rows in (28, 30, 32)
    )
    assert less.price.step_seconds <= unequal.price.step_seconds <= more.price.step_seconds
    assert less.price.peak_bytes <= unequal.price.peak_bytes <= more.price.peak_bytes
    assert less.price.step_seconds < more.price.step_seconds
    assert captured_batch(unequal.graph) == 8 and unequal.plan.micro_batches == 4


def test_the_price_of_the_best_is_that_of_the_others_at_most() -> None:
    result = found(batch=32, cuts_batch=True)
    assert all(result.best.price.step_seconds <= e.price.step_seconds for e in result.others)


def test_the_price_that_ranks_stages_is_the_one_that_is_shown() -> None:
    """Stages were ranked with 10 us for each kernel on machines that name no such time, and shown without."""
    best = search_plan(GRAPH, Request(TOY, mesh={"pp": 2}, micro_batches=2)).best
    shown = composed(best.graph, best.plan, TOY)
    assert best.price.step_seconds == pytest.approx(shown.step_seconds)
    assert best.price.peak_bytes == pytest.approx(shown.peak_bytes)


def test_without_leave_a_batch_is_cut_for_stages_alone() -> None:
    result = found(2)
    every = (result.best, *result.others)
    assert all(e.plan.micro_batches == 2 for e in every if e.plan.pipeline is None)


def test_a_larger_bound_is_never_slower() -> None:
    free = found(batch=32, cuts_batch=True).best
    bounds = [int(share * free.price.peak_bytes) for share in (0.97, 1.0, 1.5, 2.0)]
    steps = []
    for bound in bounds:
        best = found(batch=32, cuts_batch=True, memory_bytes=bound).best
        assert best.price.peak_bytes <= bound
        steps.append(best.price.step_seconds)
    assert all(more <= less * 1.001 for less, more in itertools.pairwise(steps))


def test_depth_under_a_recipe_for_every_axis() -> None:
    plan = found(8, recipe="dp:zero1,tp:tp", micro_batches=8).best.plan
    assert plan.mesh.names == ("dp", "tp") and plan.world_mesh.size == 4


def test_a_named_schedule_asks_for_stages() -> None:
    plan = found(8, recipe="gpipe", micro_batches=8).best.plan
    assert plan.pipeline is not None and plan.pipeline.ranks > 1
    assert plan.pipeline.schedule == "gpipe"


def depth_under(recipe: str, **options: Any) -> int:
    plan = found(recipe=recipe, **options).best.plan
    return 1 if plan.pipeline is None else plan.pipeline.ranks


def test_a_recipe_that_names_no_schedule_asks_for_no_stages() -> None:
    """Four stages would be faster, and leave one rank each, on which a recipe has no effect."""
    assert depth_under("pp:auto,dp:zero3,tp:zero3") > 1
    assert depth_under("zero3") == depth_under("dp:ddp") == 1
    assert depth_under("auto", schedule="gpipe") > 1 and depth_under("auto", chunks=2) > 1


def test_stages_beneath_a_recipe_where_nothing_fits_without() -> None:
    whole = Request(TOY, mesh={"dp": 4}, recipe="ddp", recompute="none", micro_batches=1)
    peak_bytes = GivenMesh(Case(GRAPH, whole)).search().price.peak_bytes
    tight = {"memory_bytes": int(0.6 * peak_bytes), "recompute": "none"}
    assert depth_under("ddp", **tight) > 1
    with pytest.raises(SearchError, match="No plan on 4 ranks") as error:
        depth_under("ddp", memory_bytes=10**5, recompute="none")
    assert "pp=2,dp=2" in str(error.value) and "pp=4" in str(error.value)


def test_each_setting_is_said_before_it_is_searched() -> None:
    lines: list[str] = []
    search_plan(GRAPH, Request(TOY, ranks=4), progress=lines.append)
    assert lines[0].startswith("searching the plan: ") and len(lines) > 1
    assert "; fastest so far " not in lines[0] and "; fastest so far " in lines[-1]


def test_one_rank_has_no_pipeline_and_one_axis() -> None:
    plan = found(2, ranks=1).best.plan
    assert plan.pipeline is None and plan.world_mesh == Mesh.of({"dp": 1})
    assert search_plan(mlp(), Request(TOY, ranks=1)).best.plan.mesh == Mesh.of({"dp": 1})


def test_a_recipe_over_two_axes_is_tried_on_two_axes() -> None:
    request = Request(TOY, ranks=4, recipe="dp:ddp,tp:tp")
    assert search_plan(llama(SMALL), request).best.plan.mesh.names == ("dp", "tp")


@pytest.mark.parametrize(("refused", "mesh"), [("dp", "tp=4"), ("tp", "dp=4")])
def test_an_axis_that_is_refused_has_no_ranks(refused: str, mesh: str) -> None:
    """One sample leaves no estimates, so that every mesh is searched; `--no dp` gave dp=2,tp=2."""
    sizes = replace(SMALL, batch=1, kv_heads=4, group=1)
    request = Request(TOY, ranks=4, stages=(1,), without=frozenset({refused}))
    assert str(search_plan(llama(sizes), request).best.plan.mesh) == mesh
    with pytest.raises(SearchError, match="rule out every mesh"):
        search_plan(llama(sizes), request.but(without=frozenset({"dp", "tp"})))


def test_depths_are_those_of_the_request_and_no_more_than_the_blocks() -> None:
    assert depths_of(GRAPH, Request(TOY, ranks=12)) == ([1, 2, 3, 4, 6], ())
    assert depths_of(GRAPH, Request(TOY, ranks=4, stages=(1, 2))) == ([1, 2], ())
    assert depths_of(GRAPH, Request(TOY, ranks=4, recipe="zero3")) == ([1], [2, 4])
    with pytest.raises(SearchError, match=r"stages=3: with 4 ranks this model can have 1 or 2 or 4 stages"):
        depths_of(GRAPH, Request(TOY, ranks=4, stages=(1, 2, 3)))


def test_stages_that_a_recipe_does_not_name_say_why() -> None:
    def unasked(**options: Any) -> list[str]:
        return [n for n in found(**options).best.plan.notes if kind_of(n) == "unasked"]

    (note,) = unasked(ranks=8, recipe="ddp", batch=4)
    assert "the recipe ddp does not name" in note and "no mesh of 8 ranks splits a batch of 4" in note
    assert not unasked(recipe="ddp") and not unasked(batch=32, cuts_batch=True)
