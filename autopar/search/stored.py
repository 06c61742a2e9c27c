"""What a plan stores outside its devices: whether there is room for it, and a sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import SearchError
from autopar.ir import Plan
from autopar.ir.note import Note
from autopar.pipeline.composed import stored_bytes
from autopar.search.given import Planned
from autopar.search.request import Request
from autopar.units import format_bytes


def with_stores(found: Planned, request: Request) -> Planned:
    """The plan with a note on what lies in the host's memory; itself where nothing does.

    Raises SearchError where a rank's share of that memory is too small.
    """
    far = [name for name, how in found.plan.parameters.items() if how.tier != "device"]
    if not far:
        return found
    size = stored_bytes(
        found.graph, found.plan, request.hardware, "host", software=request.software,
        training_state=request.training_state,
    )  # fmt: skip
    room = request.hardware.storing("host").memory_bytes
    if room and size > room:
        raise SearchError(
            f"On the mesh {found.plan.world_mesh} a rank would keep {format_bytes(size)} in the memory of its host, "
            f"and its share of that is {format_bytes(room)} ([host] of the hardware). What would help: more ranks "
            "along dp under ZeRO, or a host with more memory for each device."
        )
    return found._replace(plan=_noted(found, far, size))


def _noted(found: Planned, far: Sequence[str], size_bytes: float) -> Plan:
    """The plan with the note; parameters of layers that were not captured are counted too."""
    plan, times = found.plan, found.graph.stands_for
    count, whole = (sum(times.get(name, 1) for name in names) for names in (far, plan.parameters))
    every = "all parameters" if count == whole else f"{count} of {whole} parameters"
    line = (
        f"The host's memory stores {every} with their gradients and optimizer states, {format_bytes(size_bytes)} of a "
        "rank: every step brings them to the device and their gradients back, and the optimizer runs on the host."
    )
    return replace(plan, notes=(*plan.notes, Note(line, "tiers")))
