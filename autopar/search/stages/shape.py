"""The shape of a pipeline before it is cut, and the micro-batches that it has in flight."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import SearchError
from autopar.ir.pipeline import VERSIONED, Pipeline
from autopar.pipeline.schedules import Action, check_micro_batches, computations
from autopar.pipeline.weight_stashing import WeightVersions

# Of stages in a step: each is an action that is listed and simulated, a million of which take about a minute.
MOST_STAGE_RUNS = 2**18


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

    def check(self, blocks: int) -> None:
        """Raises SearchError for more stages than a model has blocks, and for a step that is too long to be listed."""
        if blocks < self.stages:
            raise SearchError(
                f"The model has {blocks} blocks, but {self.ranks} pipeline ranks with {self.chunks} "
                f"chunks take {self.stages} stages of at least one; use fewer ranks along pp, or fewer chunks."
            )
        runs = self.stages * self.micro_batches
        if runs > MOST_STAGE_RUNS:
            raise SearchError(
                f"{self.stages} stages run {self.micro_batches} micro-batches {runs} times in a step, and at most "
                f"{MOST_STAGE_RUNS} runs can be planned within minutes: take at most {MOST_STAGE_RUNS // self.stages} "
                "micro-batches."
            )

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
        """Numbers of micro-batches on every rank at its fullest moments, of shape `(2, ranks, chunks, moments)`.

        At each moment, every stage of a rank has a number of micro-batches in flight, and another one between the two
        halves of their backward. A moment is left out if another one has at least as many of both on every stage. The
        memory of the stages decides which of the remaining moments is the peak. Raises PlanError if the schedule
        cannot run this number of micro-batches.
        """
        return _flights(self)

    @property
    def flights_of_stages(self) -> np.ndarray:
        """Numbers as in `flights`, of every stage at its own fullest moments, of shape `(2, stages, moments)`."""
        return _flights_of_stages(self)

    def in_flight(self) -> tuple[int, ...]:
        """For every stage, the largest number of micro-batches whose backward has not ended; errors as in `flights`."""
        return tuple(self.flights_of_stages.sum(axis=0).max(axis=-1).tolist())

    @property
    def further_versions(self) -> np.ndarray:
        """For every stage, the number of older versions of its parameters that it keeps; errors as in `flights`."""
        if not self.blank.update_every:
            return np.zeros(self.stages, dtype=int)
        check_micro_batches(self.blank, self.micro_batches)
        return np.array(WeightVersions(self.blank, self.micro_batches).alive) - 1

    @property
    def least_in_flight(self) -> tuple[int, ...]:
        """For every rank, a number of micro-batches in flight on each of its stages at the same time.

        None of them is between the two halves of its backward.
        """
        return tuple(self.flights[0].min(axis=1).max(axis=-1).tolist())


# A search asks again and again for a few hundred shapes.
_SHAPES = 4096


@functools.lru_cache(maxsize=_SHAPES)
def _flights(shape: Shape) -> np.ndarray:
    m, ranks = shape.micro_batches, shape.ranks
    check_micro_batches(shape.blank, m)
    if shape.schedule in ("gpipe", "looped-bfs"):  # all forwards come before all backwards
        return _whole_backwards(np.full((ranks, shape.chunks, 1), m))
    if shape.schedule in ("1f1b", *VERSIONED):
        return _whole_backwards(np.minimum(m, np.arange(ranks, 0, -1)).reshape(ranks, 1, 1))
    blank = shape.blank
    lists = computations(blank, m)
    moments = [_moments(lists[rank], blank.stages_of(rank)) for rank in range(ranks)]
    found = np.zeros((2, ranks, shape.chunks, max(map(len, moments))), dtype=int)
    for rank, each in enumerate(moments):
        found[:, rank, :, : len(each)] = np.moveaxis(each, 0, -1)
    return found


def _whole_backwards(flights: np.ndarray) -> np.ndarray:
    """Numbers as in `Shape.flights`, of a schedule that does not split backward."""
    return np.stack([flights, np.zeros_like(flights)])


def _moments(own: Sequence[Action], stages: Sequence[int]) -> np.ndarray:
    """Numbers of micro-batches at the fullest moments of a rank, of shape `(moments, 2, chunks)`.

    The first row has those in flight, the second those between the two halves of their backward.

    Args:
        own: the rank's computations, in order.
        stages: the rank's stages.
    """
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    now, seen = [0] * (2 * len(stages)), set()
    for action in own:
        place = chunk_of[action.stage]
        now[place] += {"F": 1, "I": -1, "B": -1}.get(action.kind, 0)
        now[place + len(stages)] += {"I": 1, "W": -1}.get(action.kind, 0)
        if action.kind in ("F", "I"):
            seen.add(tuple(now))
    return _fullest(np.array(sorted(seen))).reshape(-1, 2, len(stages))


@functools.lru_cache(maxsize=_SHAPES)
def _flights_of_stages(shape: Shape) -> np.ndarray:
    by_rank = shape.flights
    rows = by_rank.reshape(2, shape.stages, -1)[:, np.argsort(np.concatenate(shape.stages_of))]
    moments = [_fullest(np.unique(rows[:, stage].T, axis=0)) for stage in range(shape.stages)]
    found = np.zeros((2, shape.stages, max(map(len, moments))), dtype=int)
    for stage, each in enumerate(moments):
        found[:, stage, : len(each)] = each.T
    return found


def _fullest(moments: np.ndarray) -> np.ndarray:
    """The rows for which no other row is at least as large in every column; all rows must be different."""
    at_most = (moments[:, None] <= moments[None, :]).all(axis=-1)
    return moments[at_most.sum(axis=1) == 1]
