"""The search for a pipeline: what it chooses, what it says, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autopar.errors import AutoparError, MeshError, PlanError, RecipeError, SearchError
from autopar.ir import Graph, Mesh, Plan, is_legal
from autopar.pipeline.parts import block_starts
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import simulate
from autopar.search.request.recipe_rows import PIPELINE_RECIPES
from autopar.search.request.recipes import format_recipe, resolve, split_recipe
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_settings import PipelineFound
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY
from tests.support.stage_costs import costs_of_stages

GRAPH = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))


def found(mesh: dict[str, int], graph: Graph = GRAPH, **options: Any) -> PipelineFound:
    request = Request(TOY, mesh=mesh, **{"micro_batches": 8, **options})
    return search_pipeline(Case(graph, request, 8))


def test_a_plan_has_stages_of_blocks_and_layouts_of_one_stage() -> None:
    plan = found({"pp": 2, "dp": 2}, schedule="1f1b", recipe="dp:zero1").plan
    assert plan.pipeline is not None
    assert (plan.pipeline.schedule, plan.pipeline.ranks, plan.pipeline.position) == ("1f1b", 2, 0)
    assert set(plan.pipeline.cuts) <= set(block_starts(GRAPH)[1:])
    assert plan.mesh == Mesh.of({"dp": 2}) and plan.world_mesh == Mesh.of({"pp": 2, "dp": 2})
    assert {how.zero_stage(0) for how in plan.parameters.values()} == {1}
    assert all(is_legal(GRAPH, op, plan.ops[op.name], plan.mesh) for op in GRAPH.ops)
    assert plan == Plan.parse(str(plan))


def test_the_pipeline_may_be_any_axis_or_the_only_one() -> None:
    plan = found({"dp": 2, "pp": 2}, schedule="gpipe").plan
    assert plan.pipeline is not None and plan.pipeline.position == 1
    assert plan.world_mesh == Mesh.of({"dp": 2, "pp": 2})
    alone = found({"pp": 4}, recipe="1f1b").plan
    assert alone.mesh == Mesh.of({"dp": 1}) and alone.world_mesh.size == 4
    assert alone.recipe == "1f1b"


def test_the_price_is_that_of_the_simulator_for_the_plan() -> None:
    best = found({"pp": 2, "dp": 2}).best
    plan = best.plan
    assert plan.pipeline is not None
    run = simulate(actions(plan.pipeline, plan.micro_batches), costs_of_stages(GRAPH, plan, TOY))
    assert run.step_seconds == pytest.approx(best.simulation.step_seconds)
    assert best.seconds > run.step_seconds  # with what is done once a step
    assert run.peak_bytes == pytest.approx(best.simulation.peak_bytes)


def test_no_setting_that_fits_is_faster() -> None:
    """Every setting alone, against the search over all of them."""
    free = found({"pp": 2}, micro_batches=None)
    every = []
    for schedule, m, recompute in itertools.product(
        ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb", "zbv", "dualpipev"), (1, 2, 4, 8, 16, 32), ("none", "full")
    ):
        try:
            alone = found({"pp": 2}, schedule=schedule, micro_batches=m, recompute=recompute)
        except PlanError:
            continue  # fewer micro-batches than stages
        every.append(alone.best.seconds)
    assert free.best.seconds == pytest.approx(min(every))
    assert free.plan.micro_batches == free.best.setting.shape.micro_batches


def test_a_schedule_that_does_not_run_so_many_micro_batches_refuses_no_other() -> None:
    """Interleaved 1F1B runs 16 micro-batches on 3 ranks in 5 rounds, and 5 does not divide 16."""
    searched = found({"pp": 3}, micro_batches=16)
    assert searched.best.setting.shape.schedule != "interleaved"
    with pytest.raises(PlanError, match="16 micro-batches on 3 pipeline ranks in 5 rounds"):
        found({"pp": 3}, micro_batches=16, schedule="interleaved")


def test_one_forward_one_backward_for_what_it_holds() -> None:
    """It has 2 micro-batches in flight instead of GPipe's 8, and waits for what it sends."""
    free = found({"pp": 2}, chunks=1, recompute="none", splits_backward=False)
    assert free.best.setting.shape.schedule == "gpipe"
    (one_by_one,) = free.others
    assert one_by_one.seconds == pytest.approx(free.best.seconds, rel=0.05)
    bound = int(max(one_by_one.balance.rank_bytes)) + 1
    assert bound < max(free.best.balance.rank_bytes)
    tight = found({"pp": 2}, chunks=1, recompute="none", memory_bytes=bound, splits_backward=False)
    assert tight.best.setting.shape.schedule == "1f1b"


def test_a_backward_in_two_halves_fills_the_bubble_where_the_runtime_splits_it() -> None:
    whole = found({"pp": 2}, chunks=1, recompute="none", splits_backward=False)
    halved = found({"pp": 2}, chunks=1, recompute="none")
    assert halved.best.setting.shape.schedule == "zb"
    assert halved.best.seconds < whole.best.seconds
    # The last rank holds what the second halves need: activations, and gradients of results.
    assert halved.best.balance.rank_bytes[-1] > whole.others[0].balance.rank_bytes[-1]


def test_a_lean_schedule_wins_where_the_faster_ones_do_not_fit() -> None:
    """V-Half takes 1.36 s, ZBV 1.24 s with 12 % more memory, and 1F1B 1.54 s with 9 % less."""
    graph = residual(8, Sizes(batch=64, width=64, hidden=128, vocab=64))
    half = found({"pp": 4}, graph, recompute="none", schedule="v-half").best
    bound = int(max(half.balance.rank_bytes)) + 1
    tight = found({"pp": 4}, graph, memory_bytes=bound)
    assert tight.best.setting == half.setting
    assert tight.best.seconds == pytest.approx(half.seconds)
    assert "1f1b" in {each.setting.shape.schedule for each in tight.others}
    wide = found({"pp": 4}, graph)
    assert not {"v-half", "v-min"} & {each.setting.shape.schedule for each in (wide.best, *wide.others)}


def test_layers_run_again_only_where_memory_is_tight() -> None:
    wide = residual(6, Sizes(batch=64, width=16, hidden=256, vocab=16))
    free = found({"pp": 2}, wide, schedule="1f1b")
    assert free.plan.recompute == "none"
    full = found({"pp": 2}, wide, schedule="1f1b", recompute="full")
    assert max(full.best.balance.rank_bytes) < max(free.best.balance.rank_bytes)
    bound = int(max(full.best.balance.rank_bytes)) + 1
    tight = found({"pp": 2}, wide, schedule="1f1b", memory_bytes=bound)
    assert tight.plan.recompute != "none"
    assert tight.best.seconds <= full.best.seconds
    assert max(tight.best.balance.rank_bytes) <= bound


def test_tight_memory_shards_more() -> None:
    """Where replicas do not fit, the memory of the search inside is halved until it shards."""
    graph = residual(6, Sizes(batch=256, width=64, hidden=128, vocab=64))
    free = found({"pp": 2, "dp": 4}, graph, recipe={"dp": "ddp"}, schedule="1f1b", recompute="none")
    held = max(free.best.balance.rank_bytes)
    tight = found({"pp": 2, "dp": 4}, graph, schedule="1f1b", recompute="none", memory_bytes=int(0.75 * held))
    assert max(tight.best.balance.rank_bytes) <= 0.75 * held
    assert _stored_in_shards(tight.plan) > _stored_in_shards(free.plan)


def _stored_in_shards(plan: Plan) -> int:
    return sum(how.storage[0].kind == "S" for how in plan.parameters.values())


def test_the_same_again() -> None:
    assert str(found({"pp": 2, "dp": 2}).plan) == str(found({"pp": 2, "dp": 2}).plan)


def test_notes_say_what_was_chosen_and_what_came_second() -> None:
    plan = found({"pp": 2}, micro_batches=None).plan
    text = "\n".join(plan.notes)
    assert "pipeline of 2 ranks: " in text and "stages begin at the first op, " in text
    assert "predicted step of the pipeline" in text and "ranks idle" in text
    assert "next best, of " in text
    assert "predicted on" not in text  # the price of the search inside, which knows no stages


def test_naive_is_one_micro_batch() -> None:
    best = found({"pp": 4}, recipe="naive-pp", micro_batches=None, recompute="none").best
    assert best.plan.pipeline is not None and best.plan.pipeline.schedule == "gpipe"
    assert best.plan.micro_batches == 1
    assert best.simulation.bubble_fraction > 0.7  # one rank of four works


@pytest.mark.parametrize("name", [n for n in PIPELINE_RECIPES if n != "dualpipev"])
def test_every_recipe_of_the_pipeline_alone(name: str) -> None:
    m = None if name == "naive-pp" else 8
    plan = found({"pp": 2}, recipe=name, micro_batches=m, recompute="none").plan
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == ("gpipe" if name == "naive-pp" else name)


@pytest.mark.parametrize(
    ("recipe", "schedule", "inside"),
    [
        ("1f1b", "1f1b", "auto"),
        ("zero3", "", "zero3"),
        ({"pp": "1f1b", "dp": "zero1"}, "1f1b", {"dp": "zero1"}),
        ("pp:interleaved,dp:zero1,tp:tp", "interleaved", {"dp": "zero1", "tp": "tp"}),
        ("pp:auto,dp:ddp", "", {"dp": "ddp"}),
        ({"pp": "zb"}, "zb", "auto"),
    ],
)
def test_recipes_name_the_schedule(recipe: Any, schedule: str, inside: Any) -> None:
    assert split_recipe(recipe) == (schedule, inside)
    assert split_recipe(format_recipe(recipe))[0] == schedule


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "1f1b", "schedule": "gpipe"}, RecipeError, "names the pipeline '1f1b'"),
        ({"schedule": "gpipipe"}, RecipeError, "There is no schedule 'gpipipe' .did you mean gpipe..; choose"),
        ({"recipe": "naive-pp", "micro_batches": 4}, RecipeError, "use gpipe"),
        ({"recipe": {"pp": "tp"}}, RecipeError, "There is no recipe 'tp' for the axis pp"),
        ({"micro_batches": 33}, SearchError, "Of a batch of 32 33 micro-batches cannot each have a row"),
        ({"schedule": "1f1b", "micro_batches": 1}, PlanError, "there are 1 for 2 stages"),
        ({"schedule": "1f1b", "chunks": 2}, PlanError, "runs 1 stage on each pipeline rank, but chunks=2"),
        ({"schedule": "gpipe", "mesh": {"pp": 16}}, SearchError, "8 blocks, but 16 pipeline ranks"),
        ({"mesh": {"dp": 2}}, MeshError, "has no axis 'pp'"),
        ({"memory_bytes": 10**5}, SearchError, "No cuts into .* stages fit into 100 kB"),
    ],
)
def test_refuses(options: dict[str, Any], error: type[AutoparError], words: str) -> None:
    options = dict(options)
    with pytest.raises(error, match=words):
        found(options.pop("mesh", {"pp": 2}), **options)


def test_a_schedule_needs_the_axis() -> None:
    with pytest.raises(RecipeError, match=r"has no axis pp; give it one, such as mesh=\{'pp': 2\}"):
        resolve("1f1b", Mesh.of({"dp": 2}))


@pytest.mark.parametrize("schedule", ["zb", "interleaved", "looped-bfs"])
def test_a_schedule_in_rounds_may_have_one_stage_a_rank(schedule: str) -> None:
    """It is searched where the schedule is named, and every rank then runs one stage."""
    result = found({"pp": 2}, recipe=schedule)
    shapes = {each.setting.shape.chunks for each in (result.best, *result.others)}
    assert {1} < shapes <= {1, 2, 3, 4, 6}  # what cannot be faster than the best is left out
    (one,) = (
        each
        for each in (result.best, *result.others)
        if each.setting.shape.chunks == 1 and each.setting.recompute == "none"
    )
    assert one.plan.pipeline is not None and len(one.plan.pipeline.cuts) == 1
    assert [len(actions(one.plan.pipeline, 8)[rank]) > 0 for rank in range(2)] == [True, True]
