"""A note in a program's graph: what a block keeps for backward of a tensor."""

from __future__ import annotations

from torch import Tensor


def kept(x: Tensor, name: str) -> Tensor:
    """Returns the tensor itself.

    The call changes nothing. It tells the runtime that from here to the next `kept` of this tensor autograd saves it
    for one block, and which slice of it this rank keeps for that block.

    Args:
        x: a tensor that a block takes.
        name: name of one of the program's slices, of which this rank's part is kept; "" where all of it is.
    """
    return x
