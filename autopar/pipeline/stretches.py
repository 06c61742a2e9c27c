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
        begins: index i of the stretch's first block; this and the next two are broadcast against each other.
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
        every = np.arange(len(turns))
        return cls.among(turns, every[:, None], every)

    @classmethod
    def among(cls, turns: Sequence[int], begins: np.ndarray, ends: np.ndarray) -> Turn:
        """The turns of some stretches, given their ends and the same."""
        latest = np.array(turns)
        return cls(latest, begins, ends, np.minimum(ends, latest[begins]))

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """The sum of a figure of every block, of shape `(n, ...)`, over each of these stretches."""
        return _between(rows, self.begins, self.ends)

    def first(self, rows: np.ndarray) -> np.ndarray:
        """The same sum over the stretch's recomputed blocks."""
        return _between(rows, self.begins, self.turns)

    def then(self, rows: np.ndarray) -> np.ndarray:
        """The same sum over the stretch's other blocks."""
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
    """Whether a stretch has one of these blocks, `n` being the number of all blocks."""
    return following(units, n)[:, None] < np.arange(n + 1)[None, :]


def following(units: Sequence[int], n: int) -> np.ndarray:
    """The first of these blocks from every block on, of shape `(n + 1,)`; n + 1 where there is none."""
    following = np.full(n + 1, n + 1)
    for unit in sorted(units, reverse=True):
        following[: unit + 1] = unit
    return following


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
