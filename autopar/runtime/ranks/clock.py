"""Duration of steps, from the start of one step to the start of the next, measured without a device synchronisation.

The time includes the optimizer and the loading of data, as the prediction does. After a few steps the host runs as
far ahead of a GPU as it can, so the time between two starts is the time of a step.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from autopar import _torch
from autopar.units import format_bytes, format_seconds

WARM_UP, MEASURED = 3, 10


class StepClock:
    """Measures step times; `tick()` returns True once, when `MEASURED` steps after `WARM_UP` have been timed.

    >>> clock = StepClock()
    >>> any(clock.tick() for _ in range(WARM_UP + MEASURED))
    False
    >>> clock.tick()
    True
    """

    def __init__(self) -> None:
        self._starts: list[float] = []

    def tick(self) -> bool:
        """Notes the start of a step; returns True once, when enough steps were measured."""
        if len(self._starts) > WARM_UP + MEASURED:
            return False
        self._starts.append(time.perf_counter())
        return len(self._starts) > WARM_UP + MEASURED

    @property
    def seconds(self) -> float:
        """Median duration of the measured steps."""
        starts = self._starts[WARM_UP:]
        return statistics.median(b - a for a, b in itertools.pairwise(starts))

    def against(self, predicted: tuple[float, float], device: torch.device) -> str:
        """A line with the measured and the predicted seconds of a step, and bytes of a rank."""
        seconds, size = predicted
        words = (
            f"measured {format_seconds(self.seconds)} a step (median of {MEASURED}), predicted "
            f"{format_seconds(seconds)}"
        )
        peak = _torch.peak_allocated_bytes(device)
        if peak is None:
            return f"{words}; predicted peak memory {format_bytes(size)} a rank"
        return f"{words}; peak memory {format_bytes(peak)}, predicted {format_bytes(size)}"
