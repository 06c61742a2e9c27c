"""A note in a program's graph: a parameter that lies in another memory is brought to the device."""

from __future__ import annotations

from torch import Tensor, fx

from autopar.ir import Tier


def to_device(x: Tensor, tier: Tier) -> Tensor:
    """Returns the tensor itself.

    The call says where a use of a parameter begins that lies in another tier during a step. The runtime replaces it,
    with the collectives that follow, by one copy to the device for each use in forward and in backward.

    Args:
        x: a parameter.
        tier: the memory that it lies in.
    """
    return x


def is_move(node: fx.Node) -> bool:
    """Whether a node brings a parameter to the device."""
    return node.target is to_device
