"""Plans with partitioned activation checkpoints: each rank saves only a slice of the activations that blocks keep.

Users ask for them with `recompute="partitioned"`: all blocks are recomputed, and the inputs that they save are sliced
along the axes that replicate them. With `recompute="offloaded"` each rank moves its slice to the host's memory until
backward. These are P_a and P_a+cpu of ZeRO-R (Rajbhandari et al. 2020, section 6.1). The layouts are those of a plan
found without slices. The price of the plan includes the all-gathers in backward, the copies and the saved memory.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir import Graph, Plan, Tier
from autopar.ir.note import without_prices
from autopar.ir.saved import words_of_saved
from autopar.pipeline.composed import Composed, composed
from autopar.pipeline.parts import is_whole
from autopar.pipeline.saved_values import SavedValues
from autopar.search.request.request import Request
from autopar.units import format_bytes


def in_slices(graph: Graph, plan: Plan, request: Request, tier: Tier = "device") -> tuple[Plan, Composed]:
    """The plan with slices in place of the replicated activations that its blocks save, and its price.

    Raises PlanError if only some of the model's layers were captured, because then the others have no names, and
    AutoparError if the machine has no figures of the tier.
    """
    if not is_whole(graph):
        raise PlanError(
            f"recompute={request.recompute!r} needs the inputs of every layer, but only a few layers of this model "
            "were captured, as for every preset and config.json. Give the model itself (on the command line a "
            "function that returns it, package.module:function), or ask for recompute='full'."
        )
    sliced = replace(plan, saved=SavedValues(graph, plan).partitioned(tier))
    whole, price = (composed(graph, each, **request.figures) for each in (plan, sliced))
    less = format_bytes(max(0, round(whole.peak_bytes - price.peak_bytes)))
    slower = 1e3 * (price.step_seconds - whole.step_seconds)
    says = (
        f"{words_of_saved(sliced.saved, plan.mesh)}: {less} less on the fullest rank for {slower:.3f} ms more a step"
        if sliced.saved
        else "the inputs of a block are kept in their layout: no axis that replicates them could split them"
    )
    return replace(sliced, notes=(*without_prices(plan.notes), says)), price
