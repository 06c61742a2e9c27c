"""Decomposes the collectives of a searched plan along mesh axes, where the user asks for that.

The search prices collectives as if nothing hid them; what a decomposed one hides is priced for the plan that was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.note import Note
from autopar.pipeline.composed import composed
from autopar.search.given import Planned
from autopar.search.request import AUTO_AXES, Request
from autopar.units import format_seconds


def with_decomposed(found: Planned, request: Request) -> Planned:
    """The plan with the axes along which the request decomposes collectives, its new price, and a note on both.

    Under "auto" an axis is decomposed if that makes the priced step shorter.
    """
    best = found
    for axes in _attempts(found, request):
        plan = replace(found.plan, decomposed=(*best.plan.decomposed, *axes))
        price = composed(
            found.graph, plan, request.hardware, software=request.software,
            training_state=request.training_state,
        )  # fmt: skip
        if request.decompose != AUTO_AXES or price.step_seconds < best.price.step_seconds:
            best = best._replace(plan=plan, price=price)
    if best is found:
        return found
    note = Note(
        f"Along {', '.join(best.plan.decomposed)} products are computed in pieces while the all-gathers before them "
        f"and the reduce-scatters after them send these: a step takes about {format_seconds(best.price.step_seconds)} "
        f"in place of {format_seconds(found.price.step_seconds)}.",
        "decomposed",
    )
    return best._replace(plan=replace(best.plan, notes=(*best.plan.notes, note)))


def _attempts(found: Planned, request: Request) -> Iterator[tuple[str, ...]]:
    """The axes to decompose, one after the other under "auto", else all at once."""
    mesh = found.plan.mesh
    if request.decompose == AUTO_AXES:
        yield from ((axis,) for axis, size in mesh.axes if size > 1)
    elif request.decompose:
        yield request.decompose
