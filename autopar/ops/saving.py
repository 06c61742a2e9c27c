"""A note in a program's graph: what a block keeps for backward of a tensor."""

from __future__ import annotations

from torch import Tensor


def kept(x: Tensor, name: str) -> Tensor:
    """Returns the tensor itself.

    Whoever runs the graph learns that autograd saves it from here on, until the next note on it, for the block
    that the name is of.

    Args:
        x: a tensor that a block takes.
        name: name of one of the program's slices, of which this rank's part is kept; "" where all of it is.
    """
    return x
