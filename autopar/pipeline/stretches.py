"""Sums, unions and maxima over every stretch of blocks.

A stretch has the blocks i to j - 1, for i and j from 0 to n. An array over stretches has the figure of this
stretch at `[i, j]`, and the shape `(n + 1, n + 1, ...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """The *turn* of stretches: the block at which recomputation ends. The blocks before it are recomputed.

    Attributes:
        latest: for every block, the turn of the longest stretch that begins with it, of shape `(n + 1,)`.
        begins: index i of the first block of each stretch. The shapes of this and the next two arrays broadcast.
        ends: index j of the block after each stretch.
        turns: index of the first block of each stretch that is not recomputed, or j.
    """

    latest: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    turns: np.ndarray

    @classmethod
    def of(cls, turns: Sequence[int]) -> Turn:
        """The turns of all stretches, given the turn of the longest stretch that begins with each block."""
        every = np.arange(len(turns))
        return cls.among(turns, every[:, None], every)

    @classmethod
    def among(cls, turns: Sequence[int], begins: np.ndarray, ends: np.ndarray) -> Turn:
        """The turns of some stretches, given their ends, and the turn of the longest stretch from each block."""
        latest = np.array(turns)
        return cls(latest, begins, ends, np.minimum(ends, latest[begins]))

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """The sum of a figure of every block, of shape `(n, ...)`, over each of these stretches."""
        return _between(rows, self.begins, self.ends)

    def first(self, rows: np.ndarray) -> np.ndarray:
        """The sum of a figure over the recomputed blocks of each of these stretches."""
        return _between(rows, self.begins, self.turns)

    def then(self, rows: np.ndarray) -> np.ndarray:
        """The sum of a figure over the blocks that are not recomputed, of each of these stretches."""
        return _between(rows, self.turns, self.ends)


def sums(rows: np.ndarray) -> np.ndarray:
    """The sum of a figure of every block, of shape `(n, ...)`, over every stretch; 0 where j is not after i."""
    every = np.arange(len(rows) + 1)
    return _between(rows, every[:, None], every)


def _between(rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    total = np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows, axis=0)])
    found = total[ends] - total[begins]
    return np.maximum(0, found, out=found) if (rows >= 0).all() else found


def has(units: Sequence[int], n: int) -> np.ndarray:
    """Whether each stretch has at least one of the blocks `units`, out of `n` blocks."""
    return following(units, n)[:, None] < np.arange(n + 1)[None, :]


def following(units: Sequence[int], n: int) -> np.ndarray:
    """For every block, the first of the blocks `units` at or after it, of shape `(n + 1,)`; n + 1 if there is none."""
    following = np.full(n + 1, n + 1)
    for unit in sorted(units, reverse=True):
        following[: unit + 1] = unit
    return following


def largest(values: np.ndarray) -> np.ndarray:
    """The largest figure of a block in every stretch, given the figures of all blocks, of shape `(n,)`."""
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for i in range(n):
        found[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return found


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The quotient of two arrays; 0 where the divisor is 0."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)
