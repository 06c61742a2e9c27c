"""A plan with stages, simulated: figures by hand, sums, and what is of the closed form instead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cost_model import Link
from autopar.cost_model.machines.cluster import Cluster
from autopar.errors import AutoparError
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.explanation.report import as_text
from autopar.explanation.simulated import SimulatedStep
from autopar.ir import Graph, Pipeline, Plan
from autopar.search import search
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_settings import SEARCHED_SCHEDULES, ZERO_BUBBLE, PipelineFound
from tests.search.stacked import Sizes, in_a_row, residual
from tests.search.toy import TOY

GRAPH = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
MACHINE = replace(TOY, reserved_bytes=1000)
FREE = Link(1e30, 0.0)


def found(mesh: dict[str, int], **options) -> PipelineFound:
    request = Request(MACHINE, mesh=mesh, **{"micro_batches": 8, "recompute": "none", **options})
    return search_pipeline(Case(GRAPH, request, 8))


def explained(plan: Plan, graph: Graph = GRAPH) -> Explanation:
    return Explanation(graph, plan, Cluster(MACHINE, 1), run_of(plan))


@pytest.fixture(scope="module")
def searched() -> PipelineFound:
    return found({"pp": 2, "dp": 2}, schedule="1f1b", recipe="dp:zero1")


@pytest.fixture(scope="module")
def e(searched: PipelineFound) -> Explanation:
    return explained(searched.plan)


def alike(stages: int, schedule: str, ranks: int, micro_batches: int) -> SimulatedStep:
    """Equal products, one a stage, whose sends take nothing."""
    graph = in_a_row(*((f"layers.{i}", "w") for i in range(stages)))
    start = replace(graph.tensors["x"], needs_grad=True)  # else the first stage has less to do
    graph = replace(graph, tensors={**graph.tensors, "x": start})
    machine = replace(MACHINE, launch_seconds=0.0, inside_node=FREE, across_nodes=FREE)
    plan = search(graph, {"dp": 1}, hardware=machine, micro_batches=micro_batches)
    cuts = tuple(op.name for op in graph.ops[1:])
    plan = replace(plan, pipeline=Pipeline(ranks, schedule, cuts))
    return SimulatedStep(graph, plan, machine)


@pytest.mark.parametrize(
    ("stages", "schedule", "ranks", "micro_batches", "bubble"),
    [
        (4, "1f1b", 4, 8, 3 / 11),
        (4, "gpipe", 4, 8, 3 / 11),
        (2, "1f1b", 2, 3, 1 / 4),
        (4, "interleaved", 2, 4, 1 / 9),
        (4, "looped-bfs", 2, 4, 1 / 9),
    ],
)
def test_equal_stages_idle_as_the_closed_form_says(
    stages: int, schedule: str, ranks: int, micro_batches: int, bubble: float
) -> None:
    step = alike(stages, schedule, ranks, micro_batches)
    assert step.closed_bubble == pytest.approx(bubble)
    assert step.simulation.bubble_fraction == pytest.approx(bubble)
    assert any("all stages take as long" in line for line in step.sentences)


def test_a_backward_in_halves_has_no_closed_form() -> None:
    step = alike(2, "zb", 2, 4)
    assert step.closed_bubble is None
    assert "for which there is no closed form" in " ".join(step.sentences)
    assert step.simulation.bubble_fraction < 1 / 5  # that of 1F1B


@pytest.mark.parametrize("schedule", ["zb", "zbv", "dualpipev"])
def test_time_of_a_backward_in_halves_adds_up(schedule: str) -> None:
    """The host takes long for what the second half runs again."""
    machine = replace(MACHINE, host_seconds=1e-3)
    request = Request(machine, mesh={"pp": 2, "dp": 1}, micro_batches=8, recompute="none", schedule=schedule)
    plan = search_pipeline(Case(GRAPH, request, 8)).plan
    step = SimulatedStep(GRAPH, plan, machine)
    assert step.time.value == pytest.approx(step.seconds)
    backward = step.time.part("backward")
    assert backward.value == pytest.approx(sum(part.value for part in backward.parts))
    again = {part.name: part.value for part in backward.parts}.get("split in two halves", 0.0)
    assert (again > 0.0) == (step.busiest_rank > 0 or schedule != "zb")  # stage 0 does not split
    rows = [row for row in step.stages if row.rank == step.busiest_rank]
    assert sum(row.forward_seconds for row in rows) * 8 == pytest.approx(step.time.part("forward").value)
    assert sum(row.backward_seconds for row in rows) * 8 == pytest.approx(backward.value)


@pytest.mark.parametrize("schedule", [*SEARCHED_SCHEDULES, *ZERO_BUBBLE])
def test_the_price_is_that_of_the_search(schedule: str) -> None:
    """DualPipeV splits some backwards and runs the others whole."""
    machine = replace(MACHINE, host_seconds=1e-3)
    mesh, count = {"pp": 2, "dp": 1}, {"micro_batches": 8}
    request = Request(machine, mesh=mesh, recompute="none", schedule=schedule, **count)
    found = search_pipeline(Case(GRAPH, request, 8))
    step = SimulatedStep(GRAPH, found.plan, machine)
    assert step.seconds == pytest.approx(found.best.seconds, rel=1e-12)


def test_micro_batches_in_flight() -> None:
    """GPipe holds all, 1F1B on rank r as many as there are ranks from it on."""
    assert [row.in_flight for row in alike(4, "gpipe", 4, 8).stages] == [8, 8, 8, 8]
    assert [row.in_flight for row in alike(4, "1f1b", 4, 8).stages] == [4, 3, 2, 1]
    step = alike(4, "gpipe", 4, 8)
    for row, peak in zip(step.stages, step.simulation.peak_bytes, strict=True):
        working = step.costs[row.number].working_bytes
        assert peak == row.kept_bytes + row.in_flight * row.saved_bytes + working


def test_the_explanation_says_what_the_search_found(e: Explanation, searched: PipelineFound) -> None:
    best = searched.best
    assert e.step_seconds == pytest.approx(best.seconds)
    assert e.memory_bytes == pytest.approx(max(best.balance.rank_bytes) + 1000)
    assert e.simulation == best.simulation
    assert e.ranks == 4
    assert e.closed_form.step_seconds != e.step_seconds


def test_trees_are_sums(e: Explanation) -> None:
    step = e.simulated
    assert step is not None
    assert e.time.value == pytest.approx(e.step_seconds)
    assert e.memory.value == pytest.approx(e.memory_bytes)
    for tree in (e.time, e.memory, e.traffic):
        for _, node in tree.walk():
            if node.parts:
                assert node.value == pytest.approx(sum(part.value for part in node.parts))
    kept = sum(step.costs[s].kept_bytes for s in step.pipeline.stages_of(step.fullest_rank))
    kinds = ("parameters", "gradients", "optimizer")
    assert sum(e.memory.part(kind).value for kind in kinds) == pytest.approx(kept)
    assert e.memory.part("reserved").value == 1000


def test_the_time_of_a_measured_machine_is_a_sum_too(searched: PipelineFound) -> None:
    """What the runtime takes for each step was measured with the machine."""
    step = SimulatedStep(GRAPH, searched.plan, replace(MACHINE, step_seconds=1e-3))
    assert step.time.value == pytest.approx(step.seconds)
    assert max(each.start_seconds + each.duration_seconds for each in step.events) == pytest.approx(step.seconds)


def test_the_trace_ends_when_the_step_does(e: Explanation) -> None:
    assert max(each.start_seconds + each.duration_seconds for each in e.trace) == pytest.approx(e.step_seconds)
    assert {each.lane for each in e.trace if each.name.startswith("gathers")} == {"rank 0", "rank 1"}


def test_time_by_hand(e: Explanation) -> None:
    """A rank computes what its stage costs, once for every micro-batch."""
    step = e.simulated
    assert step is not None
    cost = step.costs[step.busiest_rank]
    assert e.time.part("forward").value == pytest.approx(8 * cost.forward_seconds)
    assert e.time.part("backward").value == pytest.approx(8 * cost.backward_seconds)
    assert e.time.part("forward").parts[0].name == "compute"


def test_traffic_between_stages_by_hand(e: Explanation) -> None:
    """Rows of the residual stream to the next rank: 4 rows over dp=2, 64 wide, 4 bytes, 8 times."""
    sent = e.traffic.part("along pp")
    assert sent.value == 8 * 2 * 64 * 4
    assert {part.name for part in e.traffic.parts} == {"along dp", "along pp"}
    assert e.simulated is not None
    assert e.simulated.traffic_bytes == pytest.approx(e.traffic.value)


def test_stages_have_names_and_all_parameters(e: Explanation) -> None:
    assert e.simulated is not None
    first, second = e.simulated.stages
    assert first.first == "embed" and second.last == "head"
    assert first.layers + second.layers == 6
    assert first.where.startswith("embed to layers.")
    whole = sum(math.prod(GRAPH.tensors[t].shape) for t in GRAPH.parameters.values())
    assert first.parameters + second.parameters == whole
    assert first.gradient_seconds == second.send_seconds == 0
    assert first.send_seconds == second.gradient_seconds > 0


def test_what_stages_share_is_held_by_each() -> None:
    tied = residual(2, Sizes(batch=4), tied=True)
    plan = search_pipeline(Case(tied, Request(MACHINE, mesh={"pp": 2}, micro_batches=2, schedule="1f1b"), 2)).plan
    step = SimulatedStep(tied, plan, MACHINE)
    whole = sum(math.prod(tied.tensors[t].shape) for t in tied.parameters.values())
    assert sum(row.parameters for row in step.stages) == whole + 64 * 16


def test_recomputed_layers_run_forward_twice() -> None:
    kept, again = (explained(found({"pp": 2}, schedule="1f1b", recompute=how).plan) for how in ("none", "full"))

    def part(each: Explanation, direction: str) -> dict[str, float]:
        return {p.name: p.value for p in each.time.part(direction).parts}

    assert kept.simulated is not None and again.simulated is not None
    assert part(again, "forward") == pytest.approx(part(kept, "forward"))
    assert part(again, "backward")["compute"] > part(kept, "backward")["compute"]
    assert "hidden behind compute" not in part(again, "backward")
    assert "all layers recomputed in backward" in again.simulated.sentences[0]


def test_questions_go_to_the_schedule_or_to_the_closed_form(e: Explanation) -> None:
    faster = e.what_if(flops=2, memory_bandwidth=2)
    assert faster.simulation is not None
    assert faster.step_seconds == pytest.approx(explained_on(e, flops=2, memory_bandwidth=2).step_seconds)
    assert e.what_if(hbm_bytes=5e6).bound_bytes == 5_000_000
    with pytest.raises(AutoparError, match=r"closed_form\.what_if\(b=16\)"):
        e.what_if(b=16)
    with pytest.raises(AutoparError, match="There is no size or figure 'colour'"):
        e.what_if(colour=2)
    assert e.sensitivity() == e.closed_form.sensitivity()
    assert e.solve_for("b").value == e.closed_form.solve_for("b").value
    again = e.what_if(search=True, link_bandwidth=2)
    assert again.plan.pipeline is not None and again.run.chunks == again.plan.pipeline.chunks


def explained_on(e: Explanation, **factors: float) -> Explanation:
    """On a machine whose figures were changed by hand."""
    hardware = replace(
        MACHINE,
        peak_flops=tuple((size, factors["flops"] * flops) for size, flops in MACHINE.peak_flops),
        memory_bytes_per_second=factors["memory_bandwidth"] * MACHINE.memory_bytes_per_second,
    )
    return replace(e, cluster=Cluster(hardware, 1), built=None)


def test_it_is_data_and_text(e: Explanation) -> None:
    document = e.to_json()["pipeline"]
    assert document["schedule"] == "1f1b" and len(document["stages"]) == 2
    assert document["bubble_fraction"] == e.simulation.bubble_fraction  # type: ignore[union-attr]
    assert document["closed_form"]["bubble_fraction"] == pytest.approx(1 / 9)
    assert document["closed_form"]["step_seconds"] == e.closed_form.step_seconds
    text = as_text(e)
    assert "Plan for 4 ranks as pp=2,dp=2" in text and "dp:zero1, 1f1b, 8 micro-batches" in text
    for words in ("pp=2 runs 2 stages by 1f1b", "(p - 1) / (m + p - 1) gives 11.1 %", "by simulation"):
        assert words in " ".join(text.split())


def test_a_plan_without_stages_is_its_closed_form() -> None:
    plan = search(GRAPH, {"dp": 2}, hardware=MACHINE)
    found = explained(plan)
    assert found.simulation is None and found.closed_form is found
    assert "pipeline" not in found.to_json()
