"""One price: what ranks plans is what an explanation prints, whichever way a plan is composed."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from autopar.cost_model import Cluster
from autopar.cost_model.items import FULL, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.ir import Graph, Pipeline, Plan
from autopar.ir.recompute import Recompute
from autopar.pipeline.composed import composed
from autopar.pipeline.stage_costs import StageTables
from autopar.search import search
from tests.search.graphs import LlamaSizes, llama
from tests.search.stacked import residual
from tests.search.toy import TOY

MACHINE = replace(TOY, host_seconds=1e-6, reserved_bytes=1000, memory_efficiency=0.5)
RUNTIMES = (
    AUTOPAR,
    Software(hides=0.7, hides_activations=0.3, host_seconds=5e-7, step_seconds=1e-3),
    Software(hides=0.4, runs_ahead=True, memory_efficiency=0.25, matmul_efficiency=0.5),
)
SMALL = LlamaSizes(batch=8, seq=16, layers=2, dim=32, kv_heads=4, group=2, head_dim=4, ffn=64, vocab=128)


def explained(graph: Graph, plan: Plan, software: Software, state: TrainingState) -> Explanation:
    return Explanation(graph, plan, Cluster(MACHINE, 1), run_of(plan, state), software)


GRAPHS = {"residual": residual(4), "tied": residual(3, tied=True), "llama": llama(SMALL), "short": residual(2)}


@functools.cache
def searched(name: str) -> list[Plan]:
    return [
        search(GRAPHS[name], mesh, hardware=MACHINE, recipe=recipe, micro_batches=m)
        for mesh, recipe, m in (
            ({"x": 2}, "zero3", 2),
            ({"x": 2}, "zero2", 4),
            ({"x": 2, "y": 2}, "x:zero1,y:tp", 1),
            ({"x": 4}, "auto", 2),
        )
    ]


def plans(name: str, recompute: Recompute) -> list[Plan]:
    return [replace(plan, recompute=recompute) for plan in searched(name)]


@pytest.mark.parametrize("software", RUNTIMES)
@pytest.mark.parametrize("recompute", ["none", 2, "full"])
@pytest.mark.parametrize("name", ["residual", "tied", "llama"])
def test_a_table_of_stages_with_one_stage_is_composed_alike(
    name: str, recompute: Recompute, software: Software
) -> None:
    graph = GRAPHS[name]
    for plan, state in itertools.product(plans(name, recompute), (FULL, MIXED_FLOAT32_GRADIENTS)):
        found = composed(graph, plan, MACHINE, software=software, training_state=state)
        table = StageTables(graph, plan, MACHINE, world=plan.mesh, training_state=state, software=software).at(
            plan.recompute
        )
        one = table.stage(0, table.blocks)
        each = one.forward_seconds + one.backward_seconds
        seconds = plan.micro_batches * each + float(table.once_seconds[0, -1])
        assert seconds + software.step_seconds == pytest.approx(found.step_seconds, rel=1e-9)
        peak = one.saved_bytes + one.working_bytes + one.kept_bytes + MACHINE.reserved_bytes
        assert peak == pytest.approx(found.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", 1, "full"])
def test_an_explanation_prints_what_is_composed(recompute: Recompute) -> None:
    graph = GRAPHS["short"]
    for plan, software in zip(plans("short", recompute), (*RUNTIMES, AUTOPAR), strict=True):
        state = MIXED_FLOAT32_GRADIENTS
        found = composed(graph, plan, MACHINE, software=software, training_state=state)
        shown = explained(graph, plan, software, state)
        assert shown.step_seconds == pytest.approx(found.step_seconds, rel=1e-9)
        assert shown.memory_bytes == pytest.approx(found.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("software", RUNTIMES)
def test_stages_are_composed_by_their_schedule(software: Software) -> None:
    graph = residual(4)
    plan = replace(
        search(graph, {"x": 2}, hardware=MACHINE, micro_batches=4), pipeline=Pipeline(2, "1f1b", (graph.ops[9].name,))
    )
    found = composed(graph, plan, MACHINE, software=software)
    shown = explained(graph, plan, software, FULL)
    assert (shown.step_seconds, shown.memory_bytes) == tuple(found)


def test_full_recomputation_gathers_parameters_twice_a_micro_batch() -> None:
    """ZeRO-3 sends three times its parameters: forward and recomputation gather, backward reduces."""
    graph = residual(2)
    sent = {}
    for recompute in ("none", "full"):
        plan = replace(search(graph, {"x": 2}, hardware=MACHINE, recipe="zero3"), recompute=recompute)
        tree = explained(graph, plan, AUTOPAR, FULL).traffic.part("along x")
        sent[recompute] = sum(
            part.value for part in tree.parts if ".*." in part.name and part.name.startswith(("all_g", "red"))
        )
    whole = sum(4 * 16 * 32 * 2 for _ in range(2))  # bytes of up and down in two layers
    assert sent == {"none": 3 * whole / 2, "full": 3 * whole / 2}
