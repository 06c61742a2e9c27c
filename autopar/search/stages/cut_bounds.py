"""Arithmetic of balanced cuts: the best cuts for given seconds and bytes of blocks, and bounds on them."""

from __future__ import annotations

import math

import numpy as np

ROUNDING = 1 + 1e-9  # tolerance, because sums of the same seconds in another order differ


def is_less(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether `a` is smaller than `b` in the first figure in which they differ by more than rounding."""
    return next((x < y for x, y in zip(a, b, strict=True) if not math.isclose(x, y)), False)


def windows(figures: np.ndarray, stages: int) -> np.ndarray:
    """A view of a table `[begin block, end block]` of shape `(stages, w, w)`, with the possible ends of every
    stage.

    Stage s has at least s blocks before it, one for each earlier stage, and one block after it for each later
    stage. Element `[s, a, b]` is the stage from block s + a to block s + b, both included. The next stage then
    begins at index b of its own begins.
    """
    row, column = figures.strides
    width = len(figures) - stages
    return np.lib.stride_tricks.as_strided(
        figures[:, 1:], (stages, width, width), (row + column, row, column), writeable=False
    )


def best_cuts(seconds: np.ndarray, held: np.ndarray, bound: float) -> tuple[int, ...] | None:
    """The fastest cuts that fit; of equally fast ones the smallest, then the earliest; None if none fit."""
    weights = np.where(held <= bound, seconds, np.inf)
    slowest = least_largest(weights)
    if not np.isfinite(slowest):
        return None
    weights = np.where(weights <= slowest * ROUNDING, held, np.inf)
    largest = least_largest(weights)
    return earliest(weights <= largest * ROUNDING)


def least_largest(weights: np.ndarray) -> float:
    """The smallest possible weight of the heaviest stage, given the weights of all possible stages (see `windows`)."""
    best = np.full(weights.shape[1], np.inf)
    best[0] = 0.0
    for stage in weights:
        best = np.maximum(best[:, None], stage).min(axis=0)
    return float(best[-1])


def earliest(allowed: np.ndarray) -> tuple[int, ...]:
    """The cuts with the earliest first cut, then the earliest second cut, and so on, among the allowed stages."""
    last = allowed.shape[1] - 1
    ends = np.arange(last + 1) == last  # whether the later stages can reach the end from each begin
    reach = [ends]
    for stage in allowed[:0:-1]:
        ends = (stage & ends[None, :]).any(axis=1)
        reach.append(ends)
    cuts, begin = [], 0
    for number, (stage, possible) in enumerate(zip(allowed[:-1], reach[:0:-1], strict=True)):
        begin = int(np.argmax(stage[begin] & possible))
        cuts.append(number + 1 + begin)
    return tuple(cuts)
