"""What the report says of other layouts on a plan's mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model import find_cluster
from autopar.explanation.advice import Question
from autopar.explanation.explanation import Explanation
from autopar.explanation.nearness import most_gained, words_of_gain
from autopar.explanation.pages import page_of
from autopar.ir import Mesh
from autopar.search.request.request import Request


@pytest.fixture(scope="module")
def found() -> Explanation:
    request = Request.on(find_cluster("h100x4"), batch=8, mesh=Mesh.parse("dp=2,tp=2"))
    return Question("gpt2", request, 64).answer()


def test_the_report_says_how_far_from_the_best_a_plan_can_be(found: Explanation) -> None:
    page, gained = page_of(found, ""), found.most_gained
    assert gained is not None
    assert words_of_gain(gained)[0] in page.notes
    assert page.document["most_gained_by_layouts"] == gained


def test_a_worse_plan_is_farther_from_the_best(found: Explanation) -> None:
    request = Request.on(find_cluster("h100x4"), batch=8, mesh=Mesh.parse("dp=2,tp=2"), recipe="dp:zero3,tp:tp")
    named, gained = Question("gpt2", request, 64).answer(), found.most_gained
    assert gained is not None and named.most_gained is not None
    slower = named.step_seconds / found.step_seconds
    assert 1 + named.most_gained == pytest.approx(slower * (1 + gained), rel=2e-3)


def test_a_mesh_that_only_stores_parameters_is_bounded() -> None:
    """Nothing divides five ranks, so that without the recipe no search would take the mesh."""
    request = Request.on(find_cluster("h100x5"), batch=1, mesh=Mesh.parse("dp=5"), recipe="dp:zero3")
    assert Question("gpt2", request, 64).answer().most_gained is not None


def test_plans_with_parameters_on_the_host_are_among_the_others() -> None:
    """By a recipe all states are on the host; a search leaves there what does not fit, and is 1.24 times as fast."""
    request = Request.on(
        find_cluster("h100x2"), batch=8, mesh=Mesh.parse("dp=2"), memory_bytes="1.6GB", recompute="none"
    )
    named, best = (Question("gpt2", request.but(recipe=recipe), 64).answer() for recipe in ("dp:zero-offload", "auto"))
    slower = named.step_seconds / best.step_seconds - 1
    assert slower > 0.1 and (named.most_gained is None or named.most_gained >= slower)


def test_gains_are_rounded_up() -> None:
    assert words_of_gain(0.00401) == ("No other layouts on this mesh are faster by more than 0.5 %.",)


def test_nothing_is_said_of_plans_that_recompute(found: Explanation) -> None:
    assert most_gained(found.but(plan=replace(found.plan, recompute="full"))) is None
    assert words_of_gain(None) == ()
