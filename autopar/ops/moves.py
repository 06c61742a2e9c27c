"""A mark in a program's graph: here a parameter that lies in another memory is copied to the device."""

from __future__ import annotations

from torch import Tensor, fx

from autopar.ir import Tier


def to_device(x: Tensor, tier: Tier) -> Tensor:
    """Returns the tensor itself.

    The call marks the beginning of a use of a parameter that lies in another tier during a step. The runtime replaces
    it, with the collectives that follow, by one copy to the device for each use in forward and in backward.

    Args:
        x: a parameter.
        tier: memory that has the parameter.
    """
    return x


def is_move(node: fx.Node) -> bool:
    """Whether a node is such a mark."""
    return node.target is to_device
