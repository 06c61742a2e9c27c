"""Memory of a plan outside the devices (host, disks): checks that it fits, and adds a note about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import SearchError
from autopar.ir import TIERS, Tier
from autopar.ir.note import Note
from autopar.pipeline.composed import stored_bytes
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_bytes


def with_stores(found: Planned, request: Request) -> Planned:
    """The plan with notes on tensors that are stored outside the devices; unchanged if there are none.

    Raises SearchError if a rank's share of the host's memory or of the disks is too small.
    """
    tiers = {how.tier for how in found.plan.parameters.values()}
    if tiers | {how.tier for how in found.plan.saved.values()} <= {"device"}:
        return found
    sizes = {tier: stored_bytes(found.graph, found.plan, tier=tier, **request.figures) for tier in TIERS[1:]}
    for tier, size in sizes.items():
        room = request.hardware.storing(tier).memory_bytes if size else 0
        if room and size > room:
            raise SearchError(
                f"On the mesh {found.plan.world_mesh} a rank would keep {format_bytes(size)} {_PLACES[tier]}, and its "
                f"share of that is {format_bytes(room)} ([{tier}] of the hardware). What would help: more ranks along "
                f"dp under ZeRO, or {_LARGER[tier]} for each device."
            )
    for line in _lines(found, sizes):
        found = found.noted(Note(line, "tiers"))
    return found


_PLACES = {"host": "in the memory of its host", "nvme": "in files on its disks"}
_LARGER = {"host": "a host with more memory", "nvme": "larger disks"}


def _lines(found: Planned, sizes: Mapping[Tier, float]) -> Iterator[str]:
    """A sentence for each tier in which parameters are stored; it counts the parameters of all layers."""
    plan, times = found.plan, found.graph.layer_count
    if any(how.tier == "host" for how in plan.saved.values()):
        yield (
            f"The host's memory keeps activations between forward and backward; in all it stores "
            f"{format_bytes(sizes['host'])} of a rank."
        )
    whole = sum(times.get(name, 1) for name in plan.parameters)
    for tier, size in sizes.items():
        far = {name: how for name, how in plan.parameters.items() if how.tier == tier}
        if not far:
            continue
        count = sum(times.get(name, 1) for name in far)
        every = "all parameters" if count == whole else f"{count} of {whole} parameters"
        stores = "The host's memory stores" if tier == "host" else "Files on disk store"
        for_uses = sum(times.get(n, 1) for n, how in far.items() if how.resident_tier != "device")
        when = "for each use" if for_uses == count else "once a step"
        if 0 < for_uses < count:
            when = f"for each use, {count - for_uses} of them once a step,"
        yield (
            f"{stores} {every} with their gradients and optimizer states, {format_bytes(size)} per rank: they are "
            f"brought to the device {when} and their gradients back, and the optimizer runs on the host."
        )
