"""What travels while something else computes, where the user asks for that: pieces of collectives, and micro-batches.

The search prices collectives as if nothing hid them. What the pieces of a decomposed one hide, what hides behind the
ops of another micro-batch, and the memory of several micro-batches at a time are priced for the plan that was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import SearchError
from autopar.ir import Plan
from autopar.ir.features import Feature, conflict
from autopar.ir.note import Note
from autopar.pipeline.composed import Composed, composed
from autopar.search.request.options import AUTO_AXES
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_bytes, format_seconds


def with_decomposed(found: Planned, request: Request) -> Planned:
    """The plan with the axes along which the request decomposes collectives, its new price, and a note on both.

    Under "auto" an axis is decomposed if that makes the priced step shorter.
    """
    if not request.decompose:
        return found
    # A search of stages adds a time to launch kernels, so that its own price is not the one to compare with.
    before = composed(found.graph, found.plan, **request.figures)
    plan, price = found.plan, before
    for axes in _attempts(found, request):
        tried = replace(plan, decomposed=(*plan.decomposed, *axes))
        cost = composed(found.graph, tried, **request.figures)
        if request.decompose != AUTO_AXES or cost.step_seconds < price.step_seconds:
            plan, price = tried, cost
    if plan is found.plan:
        return found
    gained = before.step_seconds - price.step_seconds
    note = Note(_words(plan.decomposed, price, before), "decomposed")
    price = Composed(found.price.step_seconds - gained, price.peak_bytes)
    return found._replace(plan=plan, price=price).noted(note)


def _words(decomposed: Sequence[str], price: Composed, before: Composed) -> str:
    """Says which axes are decomposed, with the step's time before and after; or that there is nothing to decompose."""
    axes = ", ".join(decomposed)
    seconds = [format_seconds(each.step_seconds) for each in (price, before)]
    if price.step_seconds == before.step_seconds:
        return (
            f"Along {axes} nothing is decomposed: no all-gather is read only by linear layers, and no linear layer is "
            f"read only by a reduce-scatter (layers rounded to float8 do not count). A step takes about {seconds[0]}, "
            "as without; the recipe tp+sp has such collectives."
        )
    return (
        f"Along {axes} products are computed in pieces, while the all-gathers before them and the reduce-scatters "
        f"after them send other pieces: a step takes about {seconds[0]} in place of {seconds[1]}."
    )


def _attempts(found: Planned, request: Request) -> Iterator[tuple[str, ...]]:
    """The axes to decompose, one after the other under "auto", else all at once."""
    mesh = found.plan.mesh
    if request.decompose == AUTO_AXES:
        yield from ((axis,) for axis, size in mesh.axes if size > 1)
    elif request.decompose:
        yield request.decompose


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
    return found.priced(plan, price).noted(note)


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
