"""How much faster other layouts on the mesh of a plan can be at most.

Layouts are the choices of ops and the storages of parameters, on the host too where a search may put them. What else a
plan has is kept: its mesh with the order of the axes, micro-batches and buckets. Where it recomputes, or has anything
else that the bound does not price (`autopar.search.exact.dual`), nothing is said.
"""

from __future__ import annotations

import math

from autopar.cost_model.owners import has_lone_ops
from autopar.explanation.costs import PlanCost
from autopar.ir import Plan
from autopar.ir.choice import DEEPER
from autopar.search.exact.dual import least_seconds
from autopar.search.exact.problem import Problem
from autopar.search.exact.question import LayoutQuestion
from autopar.search.request.recipe_rows import Tiering
from autopar.search.request.request import Request

_ROUNDING = 1e-6  # of a step that another function has priced


def most_gained(cost: PlanCost) -> float | None:
    """The part of the step, 0 or more, by which it is longer at most than with the best layouts; None if unknown."""
    request = cost.request
    if request is None or cost.overrides or cost.cluster.hardware.kinds or not _is_bounded(cost.plan):
        return None
    tiers = _tiers(request)
    if not {Tiering(how.tier, how.resident_tier) for how in cost.plan.parameters.values()} <= {*tiers}:
        return None
    asked = LayoutQuestion(
        cost.graph,
        cost.plan.mesh,
        cost.cluster.hardware,
        micro_batches=cost.plan.micro_batches,
        software=cost.software,
        training_state=cost.run.training_state,
        tiers=tiers,
        bucket_bytes=cost.plan.bucket_bytes,
    )
    least = least_seconds(Problem(asked), cost.step_seconds, cost.bound_bytes if cost.fits else None)
    if not least or least > cost.step_seconds * (1 + _ROUNDING):  # the plan is none of those that are bounded
        return None
    return max(0.0, cost.step_seconds / least - 1)


def _tiers(request: Request) -> tuple[Tiering, ...]:
    """Where parameters may be stored and used, if by the search's own decision."""
    return request.but(offload=True, streams=True).tiers if request.may_offload else request.tiers


def _is_bounded(plan: Plan) -> bool:
    """Whether a plan has layouts on one stage and nothing else."""
    others = plan.pipeline, plan.meeting, plan.saved, plan.decomposed, plan.mesh.occupied
    if any(others) or plan.recompute != "none" or plan.overlap_batches > 1 or has_lone_ops(plan):
        return False
    owned = any(state.kind == "O" for how in plan.parameters.values() for state in how.storage)
    return not owned and not any(DEEPER in label for labels in plan.ops.values() for label in labels)


def words_of_gain(gained: float | None) -> tuple[str, ...]:
    """A sentence for people, rounded up; none where nothing is known."""
    if gained is None:
        return ()
    return (f"No other layouts on this mesh are faster by more than {math.ceil(1e3 * gained) / 10:.1f} %.",)
