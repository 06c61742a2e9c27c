"""Tiers: the memories that a rank has, from the fastest to the largest.

    device    the accelerator's own memory, where ops run
    host      the memory of the rank's machine, pinned so that an accelerator copies from it directly
    nvme      files on a disk of the rank's machine

A layout says which part of a tensor a rank has; its tier says in which memory the rank keeps the part. The text
of both is the layout with the tier behind it, `S(0)@dp host`; the device is left out.
"""

from __future__ import annotations

from typing import Literal, get_args

from autopar.ir.layout import Layout, format_layout, parse_layout
from autopar.ir.mesh import Mesh

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = get_args(Tier)
# The op that brings a tensor from a tier to the device, and its transpose, which takes a gradient the other way.
TO_DEVICE, FROM_DEVICE = "to_device", "from_device"


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
