"""Parameters that lie on the ranks already, and plans that have to leave them there."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir import Mesh, ParameterPlan, Plan, R
from autopar.planning.planning import Prepared
from autopar.runtime.model.program_builder import Fixed


def goes_on(plan: Plan, fixed: Fixed, micro_batches: int, prepared: Prepared) -> bool:
    """Whether a plan has this many micro-batches and stores every parameter as it already lies."""
    placed = with_unused(fixed.parameters, prepared, plan.mesh)
    is_cut_alike = plan.pipeline == fixed.pipeline and plan.micro_batches == micro_batches
    return is_cut_alike and all(
        placed[name].storage == how.storage for name, how in plan.parameters.items() if name in placed
    )


def with_unused(fixed: Mapping[str, ParameterPlan], prepared: Prepared, mesh: Mesh) -> Mapping[str, ParameterPlan]:
    """Parameters that the first program had not are stored replicated."""
    replicated = ParameterPlan((R,) * len(mesh.axes), (R,) * len(mesh.axes))
    return {name: fixed.get(name, replicated) for name in prepared.analysis.graph.parameters}
