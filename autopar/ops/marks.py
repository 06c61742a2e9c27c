"""Marks in a program's graph, which compute nothing.

Here a parameter that lies in another memory is copied to the device, or a block keeps a tensor for backward.
"""

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
    """Whether a node marks such a copy."""
    return node.target is to_device


def kept(x: Tensor, name: str) -> Tensor:
    """Returns the tensor itself.

    The call changes nothing. It tells the runtime that from here to the next `kept` of this tensor autograd saves it
    for one block, and which slice of it this rank keeps for that block.

    Args:
        x: a tensor that a block takes.
        name: name of one of the program's slices, of which this rank's part is kept; "" where all of it is.
    """
    return x
