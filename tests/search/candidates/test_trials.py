"""Settings before their search: what they promise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopar.ir import Mesh
from autopar.search.candidates.proposals import Proposals
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import Trial, Tried, best_of_each_kind, explore, promising
from autopar.search.request.request import Request
from tests.search.stacked import residual
from tests.search.toy import TOY

BUSY_SECONDS = 24.0  # of a rank, in all micro-batches


def promised(stages: int, micro_batches: int, blocks: int, *, halves: bool) -> float:
    """The promise of a pipeline whose estimate is that of 1F1B."""
    setting = ClusterSetting(2, 1, stages, 1, micro_batches, "zero1", "tp")
    bubble = (stages - 1) / micro_batches * BUSY_SECONDS
    found = PricedCandidate(setting, BUSY_SECONDS + bubble, 1e6, 0.0, {"bubble": bubble})
    machine = dataclasses.replace(TOY, memory_bytes=80 * 10**9)
    asked = Request(machine, ranks=2 * stages, headroom=0.0, splits_backward=halves)
    return next(promising([found], asked, blocks)).promise_seconds


@pytest.mark.parametrize(
    ("stages", "micro_batches", "whole_seconds", "halves_seconds"),
    [
        (2, 8, 24.0 + 3.0 / 8, 24.0 + 3.0 / 8),  # 16 blocks on 2 ranks: an eighth of the bubble
        (2, 2, 24.0 + 12.0 / 8, 24.0 + 12.0 / 8),
        (2, 1, 48.0, 40.0),  # the only micro-batch: 16 s on each rank, and then 8 of both at once
        (4, 2, 48.0, 36.0),  # each of two takes 12 s on every rank, and waits for 8
        (4, 3, 32.0, 24.0 + 24.0 / 4),
        (1, 1, 24.0, 24.0),
    ],
)
def test_no_chunks_make_one_micro_batch_pass_faster(
    stages: int, micro_batches: int, whole_seconds: float, halves_seconds: float
) -> None:
    """53 stages a rank promised 37.7 s of the 72.6 that two ranks take for one micro-batch of 530B parameters.

    Three such settings were searched in place of the best one, and the plan took 41.6 s a step, where 38.5 are
    possible.
    """
    whole, halves = (promised(stages, micro_batches, 16, halves=each) for each in (False, True))
    assert (whole, halves) == pytest.approx((whole_seconds, halves_seconds))


def test_the_best_setting_of_the_other_kind_is_searched_without_its_recipe_too() -> None:
    """`dp=32,tp=8` was 8 % slower than two stages under recipes, and is 6 % faster without; it was not asked."""
    plan: Any = None  # the order says which is the best
    texts = ["pp=2,dp=32,tp=4", "pp=4,dp=32,tp=2", "dp=32,tp=8", "dp=64,tp=4", "dp=32,ep=8"]
    staged, deeper, flat, other, experts = [(Trial(Mesh.parse(text), 1, "auto"), plan) for text in texts]
    assert best_of_each_kind([staged, deeper, flat, other]) == [staged, flat]
    assert best_of_each_kind([flat, other, deeper, staged]) == [flat, deeper]
    assert best_of_each_kind([flat, other]) == [flat]
    assert best_of_each_kind([flat, other, experts, staged]) == [flat, staged, experts]
    assert best_of_each_kind([experts, staged, flat]) == [experts, staged]


def test_a_small_model_on_few_ranks_is_searched_on_every_mesh() -> None:
    """Estimates took 2 s, four times as long as all meshes of two ranks, and missed a plan that is 16 % faster."""
    graph, request = residual(2), Request(TOY, ranks=4)
    assert explore(graph, request, 4) is None
    first, _ = Proposals(graph, request, None).first()
    assert [str(each.mesh) for each in first][:3] == ["dp=4", "dp=2,tp=2", "pp=2,dp=2"]
    assert {each.recipe for each in first} == {"auto"}


def test_meshes_without_a_recipe_that_differ_in_names_are_searched_once() -> None:
    tried, request = Tried(), Request(TOY, ranks=4)
    first, again, recipe = (
        Trial(Mesh.parse(mesh), 2, recipe)
        for mesh, recipe in (("dp=1,tp=4", "auto"), ("dp=4", {"dp": "auto"}), ("dp=4", "dp:zero3"))
    )
    assert not tried.repeats(recipe, request)
    assert not tried.repeats(first, request)
    assert tried.repeats(again, request)
    assert not tried.repeats(recipe, request)
    assert not tried.repeats(again._replace(micro_batches=1), request)
    assert not tried.repeats(again, request.but(pins={"w": "S(0)@dp"}))
