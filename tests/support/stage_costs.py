"""The costs of the stages of a plan, for tests that simulate a schedule."""

from __future__ import annotations

from autopar.cost_model import Hardware
from autopar.cost_model.items import FULL, TrainingState
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.ir import Graph, Plan
from autopar.pipeline.parts import block_starts
from autopar.pipeline.simulation import StageCosts
from autopar.pipeline.stage_costs import StageTables


def costs_of_stages(
    graph: Graph, plan: Plan, hardware: Hardware, *, training_state: TrainingState = FULL, software: Software = AUTOPAR
) -> tuple[StageCosts, ...]:
    """The costs of the stages of a plan; a plan without a pipeline has one stage."""
    cuts = plan.pipeline.cuts if plan.pipeline else ()
    places = {op.name: i for i, op in enumerate(graph.ops)}
    starts = sorted({*block_starts(graph), *cuts}, key=places.__getitem__)
    tables = StageTables(graph, plan, hardware, starts=starts, training_state=training_state, software=software)
    return tables.costs(plan.recompute, [starts.index(name) for name in cuts])
