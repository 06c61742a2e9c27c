"""Decomposes the collectives of a searched plan along mesh axes, where the user asks for that.

The search prices collectives as if nothing hid them; what a decomposed one hides is priced for the plan that was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.ir.note import Note
from autopar.pipeline.composed import Composed, composed
from autopar.search.request.options import AUTO_AXES
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_seconds


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
    return found._replace(
        plan=replace(plan, notes=(*plan.notes, note)),
        price=Composed(found.price.step_seconds - gained, price.peak_bytes),
    )


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
