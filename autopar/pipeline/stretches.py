"""Sums, unions and maxima over every stretch of blocks.

With n blocks there are stretches from block i up to (and without) block j, for all i and j from 0 to n. An array
over stretches has the figure of that stretch at `[i, j]`, and so the shape `(n + 1, n + 1, ...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """The block of every stretch at which recomputation ends: blocks i up to there are recomputed, the rest is not.

    Attributes:
        latest: the turn of the longest stretch that begins with each block, of shape `(n + 1,)`.
        begins: index i of the stretch's first block, of shape `(n + 1, n + 1)`.
        ends: index j of the block after its last.
        turns: index of the first block that is not recomputed.
    """

    latest: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    turns: np.ndarray

    @classmethod
    def of(cls, turns: Sequence[int]) -> Turn:
        """The turns of all stretches, given the turn of the longest stretch that begins with each block."""
        begins, ends = np.indices((len(turns), len(turns)))
        latest = np.array(turns)
        return cls(latest, begins, ends, np.minimum(ends, latest[:, None]))

    def first(self, stretches: np.ndarray) -> np.ndarray:
        """The figure of every stretch's recomputed blocks, from an array over stretches."""
        return stretches[self.begins, self.turns]

    def then(self, stretches: np.ndarray) -> np.ndarray:
        """The figure of every stretch's other blocks, from an array over stretches."""
        return stretches[self.turns, self.ends]

    def has(self, first: Sequence[int], then: Sequence[int]) -> np.ndarray:
        """Whether a stretch has one of the blocks `first` among its recomputed, or one of `then` among its others.

        The same as `first(has(first, n)) | then(has(then, n))`, without looking up every stretch.
        """
        n = len(self.latest) - 1
        recomputed = _following(first, n)[:, None] < self.turns
        # Where a stretch ends before its turn, the next block from the turn on comes after its end.
        return recomputed | (_following(then, n)[self.latest][:, None] < self.ends)


def sums(rows: np.ndarray) -> np.ndarray:
    """The sum of a figure of every block, of shape `(n, ...)`, over every stretch; 0 where j is not after i."""
    total = np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows, axis=0)])
    return (
        np.maximum(0, total[None] - total[:, None])
        if (rows >= 0).all()
        else total[None] - total[:, None]
    )


def has(units: Sequence[int], n: int) -> np.ndarray:
    """Whether a stretch has one of these blocks, `n` being the number of all blocks."""
    return _following(units, n)[:, None] < np.arange(n + 1)[None, :]


def _following(units: Sequence[int], n: int) -> np.ndarray:
    """The first of these blocks from every block on, of shape `(n + 1,)`; n + 1 where there is none."""
    following = np.full(n + 1, n + 1)
    for unit in sorted(units, reverse=True):
        following[: unit + 1] = unit
    return following


def carries(spans: Sequence[tuple[int, int]], n: int) -> np.ndarray:
    """Whether a stretch, as a stage, receives or sends a tensor.

    Args:
        spans: pairs of the block that makes it and the last block that uses it.
        n: number of all blocks.
    """
    at = np.arange(n + 1)
    crosses = np.zeros(n + 1, dtype=bool)
    for made, last in spans:
        crosses[made + 1 : last + 1] = True
    return (crosses[:, None] | crosses[None, :]) & (at[:, None] < at[None, :])


def largest(values: np.ndarray) -> np.ndarray:
    """The largest figure of a block, of shape `(n,)`, in every stretch."""
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for i in range(n):
        found[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return found


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The quotient of two arrays; 0 where the divisor is 0."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)
