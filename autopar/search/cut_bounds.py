"""Arithmetic of balanced cuts: the best cuts for given seconds and bytes of blocks, and bounds on them."""

from __future__ import annotations

import math

import numpy as np

ROUNDING = 1 + 1e-9  # tolerance, because sums of the same seconds in another order differ


def is_less(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether `a` is smaller than `b` in the first figure in which they differ by more than rounding."""
    return next((x < y for x, y in zip(a, b, strict=True) if not math.isclose(x, y)), False)


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
    """The smallest possible weight of the heaviest stage, given the weights of all possible stages (see `_windows`)."""
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
