"""The word `recompute="partitioned"`: all blocks are recomputed, and keep what enters them in slices.

It is P_a of ZeRO-R (Rajbhandari et al. 2020, section 6.1). The search is that of "full"; what enters a block lies as
the found plan has it, and every such tensor that is replicated along an axis is then kept in slices along it. The
gathers that this costs in backward and the bytes that it saves are those of the plan's price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import PlanError, SearchError
from autopar.ir.note import kind_of
from autopar.ir.recompute import PARTITIONED
from autopar.ir.saved import words_of_saved
from autopar.pipeline.composed import composed
from autopar.pipeline.parts import is_whole
from autopar.pipeline.saved_values import SavedValues
from autopar.search.given import Planned
from autopar.search.request import Request
from autopar.units import format_bytes


def is_partitioned(request: Request) -> bool:
    """Whether a request asks for checkpoints in slices."""
    return request.recompute == PARTITIONED


def with_slices(found: Planned, request: Request) -> Planned:
    """A plan that keeps in slices what enters its blocks, with its price."""
    if not is_whole(found.graph):
        raise PlanError(
            "recompute='partitioned' names the inputs of every layer, and only few layers of this model were "
            "captured. Capture it with all of them, or ask for recompute='full'."
        )
    lines = SavedValues(found.graph, found.plan).partitioned()
    plan = replace(found.plan, saved=lines)
    price = composed(
        found.graph, plan, request.hardware, software=request.software,
        training_state=request.training_state,
    )  # fmt: skip
    less = format_bytes(max(0, round(found.price.peak_bytes - price.peak_bytes)))
    slower = 1e3 * (price.step_seconds - found.price.step_seconds)
    says = (
        f"{words_of_saved(lines, plan.mesh)}: {less} less on the fullest rank for {slower:.3f} ms more a step"
        if lines
        else "what enters a block is kept as it lies: no axis that could split it replicates it"
    )
    notes = tuple(note for note in plan.notes if kind_of(note) != "price")
    return found._replace(plan=replace(plan, notes=(*notes, says)), price=price)


def searched_in_slices(request: Request, search: Callable[[Request], Planned]) -> Planned:
    """The plan of a request for checkpoints in slices, given the search without them.

    Raises what the search raises, also where a plan found without a bound on memory does not fit in slices.
    """
    whole = request.but(recompute="full")
    try:
        return with_slices(search(whole), request)
    except SearchError:
        found = with_slices(search(whole.but(must_fit=False)), request)
        if request.must_fit and found.price.peak_bytes > request.bound_bytes:
            raise
        return found
