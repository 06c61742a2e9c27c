"""The shape of a pipeline before it is cut, and the micro-batches that it has in flight."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.ir.pipeline import VERSIONED, Pipeline
from autopar.pipeline.schedules import Action, check_micro_batches, computations
from autopar.pipeline.versions import WeightVersions


@dataclass(frozen=True)
class Shape:
    """A pipeline before it is cut.

    Attributes:
        ranks: number of pipeline ranks.
        chunks: stages of each rank.
        schedule: one of `autopar.ir.pipeline.PLACEMENTS`.
        micro_batches: number of micro-batches in a step.
    """

    ranks: int
    chunks: int
    schedule: str
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def cut(self, cuts: Sequence[str], position: int = 0) -> Pipeline:
        """The pipeline with its cuts. Raises PlanError where the schedule cannot have such a shape."""
        return Pipeline(self.ranks, self.schedule, tuple(cuts), position)

    @cached_property
    def blank(self) -> Pipeline:
        """A pipeline of this shape with arbitrary cuts, for computations that do not depend on the cuts."""
        return self.cut([str(number) for number in range(1, self.stages)])

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, in the graph's order."""
        return tuple(self.blank.stages_of(rank) for rank in range(self.ranks))

    @property
    def flights(self) -> np.ndarray:
        """Numbers of micro-batches in flight on every rank at its fullest moments, of shape `(ranks, chunks, moments)`.

        At each moment, every stage of a rank has a number of micro-batches in flight. A moment is left out if another
        one has at least as many on every stage. The memory of the stages decides which of the remaining moments is the
        peak. Raises PlanError if the schedule cannot run this number of micro-batches.
        """
        return _flights(self)

    def in_flight(self) -> tuple[int, ...]:
        """For every stage, the largest number of micro-batches in flight. Raises the errors of `flights`."""
        most = self.flights.max(axis=-1)
        blank = self.blank
        places = {
            stage: (rank, chunk)
            for rank in range(self.ranks)
            for chunk, stage in enumerate(blank.stages_of(rank))
        }
        return tuple(int(most[places[stage]]) for stage in range(self.stages))

    @property
    def further_versions(self) -> np.ndarray:
        """For every stage, the number of older versions of its parameters that it keeps; errors as in `flights`."""
        if not self.blank.update_every:
            return np.zeros(self.stages, dtype=int)
        check_micro_batches(self.blank, self.micro_batches)
        return np.array(WeightVersions(self.blank, self.micro_batches).alive) - 1

    @property
    def least_in_flight(self) -> int:
        """A number of micro-batches that every rank has in flight on each of its stages at the same time."""
        return int(self.flights.min(axis=1).max(axis=-1).min())


@functools.lru_cache(maxsize=64)
def _flights(shape: Shape) -> np.ndarray:
    m, ranks = shape.micro_batches, shape.ranks
    check_micro_batches(shape.blank, m)
    if shape.schedule in ("gpipe", "looped-bfs"):  # all forwards come before all backwards
        return np.full((ranks, shape.chunks, 1), m)
    if shape.schedule in ("1f1b", *VERSIONED):
        return np.minimum(m, np.arange(ranks, 0, -1)).reshape(ranks, 1, 1)
    blank = shape.blank
    lists = computations(blank, m)
    moments = [_moments(lists[rank], blank.stages_of(rank)) for rank in range(ranks)]
    found = np.zeros((ranks, shape.chunks, max(map(len, moments))), dtype=int)
    for rank, each in enumerate(moments):
        found[rank, :, : len(each)] = each.T
    return found


def _moments(own: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """Numbers of micro-batches in flight at the fullest moments of a rank, of shape `(moments, chunks)`.

    Args:
        own: the rank's computations, in order.
        stages: the rank's stages.
    """
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    now, seen = [0] * len(stages), set()
    for action in own:
        if action.kind == "F":
            now[chunk_of[action.stage]] += 1
            seen.add(tuple(now))
        elif action.kind in ("B", "W"):  # a whole backward, or the last of its two halves
            now[chunk_of[action.stage]] -= 1
    every = np.array(sorted(seen))
    at_most = (every[:, None] <= every[None, :]).all(axis=-1)  # `every` has no moment twice
    return every[at_most.sum(axis=1) == 1]
