"""Rows of a tensor that are not all zero, as they travel in place of the whole tensor ([Note: by rows]).

A row is an entry along dim 0. Rows with NaN are among those that are not zero. A row of zeros and -0.0 is left out, and
comes out as 0.0 where no rank sends anything else.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class NonzeroRows(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        indices: positions of the rows along dim 0, in order, each once.
        values: the rows.
    """

    indices: Tensor
    values: Tensor


def rows_of(x: Tensor) -> NonzeroRows:
    """The rows of a tensor that are not all zero.

    >>> import torch
    >>> rows_of(torch.tensor([[0.0, 0.0], [0.0, 3.0]])).indices
    tensor([1])
    """
    indices = x.reshape(len(x), math.prod(x.shape[1:])).any(1).nonzero().view(-1)
    return NonzeroRows(indices, x.index_select(0, indices))


def add_rows(x: Tensor, rows: NonzeroRows) -> Tensor:
    """Adds rows to a tensor in place; the order of additions is fixed, because every row occurs once."""
    return x.index_add_(0, rows.indices, rows.values)
