"""The moves of a parameter between the tiers (device, host, files) of a rank, with their bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from autopar.cost_model.arith import Quantity
from autopar.cost_model.items import Phase, Region, WorkItem
from autopar.cost_model.machines.hardware import Hardware
from autopar.ir import ParameterPlan, Tier
from autopar.ir.tier import Move, is_farther, moves

Form = Literal["stored", "cast", "resident"]


class Carried(NamedTuple):
    """A move of a parameter, and the form that is copied.

    Attributes:
        move: source and target tier.
        form: "stored" for the shard in the dtype in which it is stored, "cast" for the shard in the dtype of its use,
            "resident" for the part that the resident layout gives the rank.
    """

    move: Move
    form: Form


def way_to_resident(how: ParameterPlan, *, casts: bool, converts: bool) -> Iterator[Carried]:
    """The moves of a parameter at the start of a step; `Residents` of the runtime's `parameters` runs them.

    Args:
        how: layouts and tiers of the parameter.
        casts: whether the parameter is cast for its use; a cast runs on the host or on the device.
        converts: whether its resident layout differs from its storage; the device runs this conversion.

    >>> from autopar.ir import R
    >>> how = ParameterPlan((R,), (R,), tier="nvme", resident_tier="host")
    >>> [(each.move.name, each.form) for each in way_to_resident(how, casts=True, converts=False)]
    [('to_host', 'stored')]
    """
    at = how.tier
    if casts and is_farther(at, "host"):
        yield from (Carried(move, "stored") for move in moves(at, "host"))
        at = "host"
    used: Form = "cast" if casts else "stored"
    nearest: Tier = "device" if converts else how.resident_tier
    yield from (Carried(move, used) for move in moves(at, nearest))
    yield from (Carried(move, "resident") for move in moves(nearest, how.resident_tier))


def way_back(way: Iterable[Move]) -> tuple[Move, ...]:
    """The same moves backwards, for the gradient: in the opposite order and direction."""
    return tuple(Move(each.backward, each.name, each.tier) for each in way)[::-1]


def move_item(
    name: str,
    move: Move,
    size_bytes: Quantity,
    hardware: Hardware,
    *,
    phase: Phase,
    region: Region,
    count: Quantity,
    carries: str,
    of: str,
    every_micro_batch: bool,
    moves: str = "",
    recomputed: int = 0,
) -> WorkItem:
    """The item of one move of a parameter, a gradient or a saved activation.

    Args:
        name: name of the tensor for reports.
        move: source and target tier.
        size_bytes: bytes that are copied.
        hardware: the machine with the bandwidth and latency of the copy.
        phase, region, count, carries, of, every_micro_batch, moves, recomputed: see `WorkItem`.
    """
    seconds = hardware.move_seconds(move, size_bytes)
    return WorkItem(
        f"{move.name} {name}",
        move.name,
        move.tier,
        phase,
        region,
        count,
        seconds,
        size_bytes,
        carries=carries,
        every_micro_batch=every_micro_batch,
        of=of,
        moves=moves,
        recomputed=recomputed,
    )
