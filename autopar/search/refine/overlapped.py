"""Lets micro-batches of a searched plan run at a time and take turns, where the user asks for that.

The search prices a step whose collectives of activations wait; what hides behind the ops of another micro-batch, and
the memory of several micro-batches at a time, are priced for the plan that was found.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import SearchError
from autopar.ir import Plan
from autopar.ir.features import Feature, conflict
from autopar.ir.note import Note, kind_of
from autopar.pipeline.composed import Composed, composed
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_bytes, format_seconds


def with_overlap(found: Planned, request: Request) -> Planned:
    """The plan with the number of micro-batches at a time that the request names, its new price, and a note on it.

    Raises PlanError if the plan has what does not go together with it, and SearchError if the step no longer fits into
    memory.
    """
    count = request.overlap_batches
    if count == 1:
        return found
    _check_unasked(request, found.plan)
    plan = replace(found.plan, overlap_batches=count)
    before, price = (composed(found.graph, each, **request.figures) for each in (found.plan, plan))
    _check_memory(request, price, before)
    note = Note(
        f"{count} micro-batches run at the same time, and the collectives of activations of one overlap with the "
        f"compute of another: a step takes about {format_seconds(price.step_seconds)} in place of "
        f"{format_seconds(before.step_seconds)}, and {format_bytes(price.peak_bytes)} a rank in place of "
        f"{format_bytes(before.peak_bytes)}.",
        "overlap",
    )
    notes = (each for each in plan.notes if kind_of(each) != "price")  # those of one at a time
    return found._replace(plan=replace(plan, notes=(*notes, note)), price=price)


def _check_unasked(request: Request, plan: Plan) -> None:
    """Raises SearchError where memory alone led the search to what does not go with micro-batches at a time."""
    overlap = {Feature.OVERLAP: f"{request.overlap_batches} micro-batches at a time"}
    words, bound = conflict(plan.features | overlap), request.search_bound_bytes
    if words and bound is not None:
        raise SearchError(
            f"To fit into {format_bytes(bound)} on a rank, a step would have {words}. Ask for more micro-batches, "
            "which are smaller, or leave out overlap_batches."
        )


def _check_memory(request: Request, price: Composed, before: Composed) -> None:
    bound = request.search_bound_bytes
    if bound is not None and price.peak_bytes > bound:
        raise SearchError(
            f"{request.overlap_batches} micro-batches at a time take {format_bytes(price.peak_bytes)} of "
            f"{format_bytes(bound)} on a rank, and one at a time {format_bytes(before.peak_bytes)}. Ask for more "
            "micro-batches, which are smaller, or leave out overlap_batches."
        )
