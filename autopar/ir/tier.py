"""Tiers: the memories that a rank has, from the fastest to the largest.

    device    the accelerator's own memory, where ops run
    host      the memory of the rank's machine, pinned so that an accelerator copies from it directly
    nvme      files on a disk of the rank's machine

A layout says which part of a tensor a rank has. The tier says in which memory the rank keeps that part. The text of
both is the layout followed by the tier, `S(0)@dp host`; the tier `device` is left out.

A *move* copies a tensor between two neighbouring tiers: from a file to the host, or from the host to the device. In
backward the gradient takes the transposed move, in the other direction.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from autopar.ir.layout import Layout, format_layout, parse_layout
from autopar.ir.mesh import Mesh

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = get_args(Tier)
TO_DEVICE, FROM_DEVICE = "to_device", "from_device"  # the link between device and host
TO_HOST, FROM_HOST = "to_host", "from_host"  # the link between host and files
_LINKS: dict[Tier, tuple[str, str]] = {"host": (TO_DEVICE, FROM_DEVICE), "nvme": (TO_HOST, FROM_HOST)}


class TieredLayout(NamedTuple):
    """Where a tensor lies: its layout, and the memory in which each rank keeps its part."""

    layout: Layout
    tier: Tier = "device"


class Move(NamedTuple):
    """A copy over the link between two neighbouring tiers.

    Attributes:
        name: name of the move, such as `to_device`.
        backward: name of the move in the other direction.
        tier: the one of the two tiers that is farther from the device.
    """

    name: str
    backward: str
    tier: Tier


def moves(source: Tier, target: Tier) -> tuple[Move, ...]:
    """The moves that bring a tensor from one tier to another.

    >>> [move.name for move in moves("nvme", "device")], [move.name for move in moves("device", "host")]
    (['to_host', 'to_device'], ['from_device'])
    """
    far, near = TIERS.index(source), TIERS.index(target)
    if far < near:
        there = reversed(moves(target, source))
        return tuple(Move(move.backward, move.name, move.tier) for move in there)
    return tuple(Move(*_LINKS[tier], tier) for tier in reversed(TIERS[near + 1 : far + 1]))


def is_farther(tier: Tier, other: Tier) -> bool:
    """Whether a tier is farther from the device than another."""
    return TIERS.index(tier) > TIERS.index(other)


def format_place(layout: Layout, tier: Tier, mesh: Mesh) -> str:
    """Text of a layout with its tier; the inverse of `parse_place`.

    >>> from autopar.ir import Mesh, R, S
    >>> format_place((S(0), R), "host", Mesh.parse("dp=2,tp=4"))
    'S(0)@dp host'
    """
    text = format_layout(layout, mesh)
    return text if tier == "device" else f"{text} {tier}"


def parse_place(text: str, mesh: Mesh) -> tuple[Layout, Tier]:
    """Reads a layout that a tier may follow. Raises LayoutError, see `parse_layout`.

    >>> from autopar.ir import Mesh, R, S
    >>> parse_place("S(0)@dp host", Mesh.parse("dp=2,tp=4")) == ((S(0), R), "host")
    True
    """
    layout, _, last = text.rpartition(" ")
    for tier in TIERS:
        if last == tier:
            return parse_layout(layout, mesh), tier
    return parse_layout(text, mesh), "device"
