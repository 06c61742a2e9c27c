"""Balancing: cuts a model into stages so that the slowest stage is as fast as possible and every stage fits.

A stage is a run of blocks. A dynamic program over the boundaries between blocks finds the best stages exactly. Let
`w_s[i, j]` be the weight of stage s if it has the blocks i to j - 1. The largest weight of the first s stages, which
end before block j, is at least

    best_0[0] = 0,    best_s[j] = min over i < j of max(best_{s-1}[i], w_{s-1}[i, j])

which takes s n^2 operations for n blocks. The program runs twice. First the weights are the seconds of a micro-batch
(forward, backward, sends), and infinite for stages that do not fit. Then they are bytes, and infinite for stages that
are slower than the first solution's slowest stage. Of several solutions the one with the earliest cuts is taken, so
that the result is always the same.

[Note: ranks with several stages] Then the sums over the stages of a rank count, in seconds and in bytes, and the
dynamic program, which decides stage by stage, cannot bound them. It gives only starting points: the fastest stages
without a bound, the fastest with an equal share of the memory for each stage, the smallest, and equal numbers of
blocks. From each start one cut at a time is moved, as long as the ranks exceed the bound by less, or by as much
and the slowest rank gets faster (then the second slowest, and so on). The best end wins. With `executed=True` the cuts
are moved further as long as the simulated schedule ends sooner, which takes a few hundred simulations. The result is a
local optimum. (For GPT-2 in 8 stages on 4 ranks, none of 2000 random cuts was faster under zbv, and some were up to
2.6 % faster under interleaved 1F1B; with one stage per rank none was faster.)

So it is with one stage per rank on several kinds of machines: with few micro-batches a step is shorter if the faster
machine has more blocks than as long takes, because the first and the last micro-batch pass all ranks in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import MemoryBoundError
from autopar.ir.pipeline import PLACEMENTS
from autopar.pipeline.schedules import actions, splits_backward, waits_for_sends
from autopar.pipeline.simulation import StepTimer
from autopar.pipeline.stage_table import StageTable
from autopar.search.stages.pipeline_bounds import ROUNDING, least_seconds
from autopar.search.stages.shape import Shape
from autopar.units import counted, format_bytes


@dataclass(frozen=True)
class Balance:
    """Cuts into stages, with their seconds and bytes.

    Attributes:
        cuts: index of the first block of every stage but the first.
        rank_seconds: for every rank the seconds of one micro-batch in all stages of the rank.
        rank_bytes: for every rank its peak memory in bytes.
    """

    cuts: tuple[int, ...]
    rank_seconds: tuple[float, ...]
    rank_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.rank_seconds)


def balance(table: StageTable, shape: Shape, *, memory_bytes: float, executed: bool = False) -> Balance:
    """The best cuts for a pipeline; if no cuts fit, those that exceed the memory least.

    With several stages on a rank they are a local optimum.

    Args:
        table: costs of all possible stages.
        shape: pipeline ranks, stages of each rank, schedule, and micro-batches of a step.
        memory_bytes: memory that a rank may use.
        executed: whether ranks with several stages, or of several kinds of machines, are balanced by simulating the
            schedule.

    Raises SearchError if there are fewer blocks than stages, and PlanError if the schedule does not allow this shape.
    """
    shape.check(table.blocks)
    return _Problem(table, shape, memory_bytes).balance(executed)


def refusal(table: StageTable, shape: Shape, *, memory_bytes: float, reserved_bytes: int = 0) -> MemoryBoundError:
    """The error where no cuts fit: it names the fullest rank of those that exceed the memory least, and by how much.

    `reserved_bytes` is memory beside it that tensors cannot use, which the error counts.
    """
    problem = _Problem(table, shape, memory_bytes)
    return problem.does_not_fit(problem.balance(), reserved_bytes)


def balance_of(table: StageTable, shape: Shape, cuts: tuple[int, ...]) -> Balance:
    """These cuts with their seconds and bytes."""
    return _Problem(table, shape, math.inf).of(cuts)


class _Problem:
    """One search for cuts, with its tables of the seconds and bytes of all possible stages."""

    def __init__(self, table: StageTable, shape: Shape, memory_bytes: float) -> None:
        self.table, self.shape, self.memory_bytes = table, shape, memory_bytes
        self.versions = shape.further_versions
        self._steps: dict[tuple[int, ...], float] = {}  # cuts -> seconds of their simulated step

    def _windows(self, figures: np.ndarray) -> np.ndarray:
        return _windows_of(figures, self.shape.stages)

    @cached_property
    def held(self) -> np.ndarray:
        """Peak bytes of every possible stage, in the shape that `_windows_of` gives.

        The stages of one rank do not reach their peaks at the same time, so that a rank takes less than their sum; see
        `Shape.flights`. Of such stages the bytes are an estimate, which only serves to find starting points.
        """
        table, figures = self.table, (self.table.kept_bytes, self.table.transient_bytes)
        kept, transient = map(self._windows, figures)
        versions = self.versions[:, None, None] * self._windows(table.version_bytes)
        return np.asarray(kept + self._flying + transient + versions)

    @property
    def _flying(self) -> np.ndarray:
        """Bytes of micro-batches in flight in every possible stage."""
        saved, late = self._windows(self.table.saved_bytes), self._windows(self.table.late_bytes)
        if self.shape.chunks > 1:
            return np.asarray(np.array(self.shape.in_flight())[:, None, None] * saved)
        moments = np.moveaxis(self.shape.flights_of_stages, -1, 0)[..., None, None]
        most: np.ndarray = np.max([flights * saved + waiting * late for flights, waiting in moments], axis=0)
        return most

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of a micro-batch in every possible stage, in the shape that `_windows_of` gives."""
        if not self.table.of_ranks:
            return self._windows(self._rank_seconds[0])
        ranks = map(self.shape.blank.rank_of, range(self.shape.stages))
        return np.stack([self._windows(self._rank_seconds[rank])[stage] for stage, rank in enumerate(ranks)])

    @cached_property
    def _rank_seconds(self) -> np.ndarray:
        """Seconds of a micro-batch in every possible stage on every rank, of shape `(ranks, n + 1, n + 1)`.

        A backward in two halves takes more than a whole one.
        """
        is_split = splits_backward(self.shape.blank)
        found = [
            each.seconds + (each.split_seconds if is_split else 0.0) for each in self.table.of_ranks or [self.table]
        ]
        return np.broadcast_to(found, (self.shape.ranks, *found[0].shape))

    def balance(self, executed: bool = False) -> Balance:
        """The fastest cuts that fit; if none fit, those that exceed the memory least."""
        if self.shape.chunks == 1 and not (executed and self.table.of_ranks):
            return self._one_each()
        return self._several_each(executed)

    def _one_each(self) -> Balance:
        """The best cuts for one stage per rank; if none fit, those with the smallest largest stage."""
        cuts = _best_cuts(self.seconds, self.held, self.memory_bytes)
        return self.of(self.smallest() if cuts is None else cuts)

    def _several_each(self, executed: bool) -> Balance:
        """The best cuts where the slowest rank alone does not tell them, see [Note: ranks with several stages]."""
        ends = {self._descend(self.of(cuts)) for cuts in dict.fromkeys(self._starts())}
        if executed:
            ends |= {self._executed(end) for end in ends}
        key = self._step_key if executed else self._rank_key
        return min(ends, key=lambda each: (*key(each), each.cuts))

    def _starts(self) -> Iterator[tuple[int, ...]]:
        """The starting points of [Note: ranks with several stages], that of least memory first."""
        stages, blocks = self.shape.stages, self.table.blocks
        yield self.smallest()
        yield tuple(stage * blocks // stages for stage in range(1, stages))
        for bound in (self.memory_bytes / self.shape.chunks, np.inf):
            cuts = _best_cuts(self.seconds, self.held, bound)
            if cuts is not None:
                yield cuts

    def smallest(self) -> tuple[int, ...]:
        """The cuts for which the largest stage takes least memory."""
        weights = np.where(np.isfinite(self.seconds), self.held, np.inf)
        return _earliest(weights <= _least_largest(weights) * ROUNDING)

    def _descend(self, best: Balance) -> Balance:
        """Moves one cut at a time, as long as the ranks fit better or the slowest rank gets faster."""
        while _is_less(self._rank_key(moved := self._best_moved(best)), self._rank_key(best)):
            best = moved
        return best

    def _executed(self, best: Balance) -> Balance:
        """Moves one cut at a time, as long as the simulated schedule gets faster.

        Cuts are simulated only if `least_seconds` allows them to be faster.
        """
        key = self._step_key(best)
        while True:
            moved = self.of_all(self._moved(best.cuts))
            promising = [each for each in moved if self._may_be_less(each, key)]
            keys = [self._step_key(each) for each in promising]
            least = min(keys, default=key)
            if not _is_less(least, key):
                return best
            best, key = promising[keys.index(least)], least

    def _may_be_less(self, each: Balance, key: tuple[float, ...]) -> bool:
        """Whether these cuts may be better than `key`, a pair of excess bytes and seconds."""
        (excess, seconds), own = key, self._excess(each)
        if own < excess:
            return True
        least = least_seconds(self.table, self.shape, each.cuts)
        return own <= excess * ROUNDING and least < seconds

    def _moved(self, cuts: tuple[int, ...]) -> np.ndarray:
        """All cuts that differ from the given ones in the place of a single cut, of shape `(moves, cuts)`."""
        edges = (0, *cuts, self.table.blocks)
        moves = [(k, to) for k, at in enumerate(cuts) for to in range(edges[k] + 1, edges[k + 2]) if to != at]
        moved = np.tile(np.array(cuts, dtype=int), (len(moves), 1))
        for row, (k, to) in zip(moved, moves, strict=True):
            row[k] = to
        return moved

    def _best_moved(self, best: Balance) -> Balance:
        """The best cuts by `_rank_key` that differ in the place of one cut; the given ones where there are none."""
        moved = self._moved(best.cuts)
        if not len(moved):
            return best
        seconds, held = self._figures(moved)
        excess = np.maximum(0.0, held.max(axis=1) - self.memory_bytes)
        slowest_first = -np.sort(-seconds, axis=1)
        first = np.lexsort((*slowest_first.T[::-1], excess))[0]
        return Balance(*(tuple(each[first].tolist()) for each in (moved, seconds, held)))

    def _rank_key(self, each: Balance) -> tuple[float, ...]:
        """Key to compare cuts, smaller is better: excess bytes, then the seconds of the ranks, slowest first."""
        return (self._excess(each), *sorted(each.rank_seconds, reverse=True))

    def _step_key(self, each: Balance) -> tuple[float, ...]:
        """Key to compare cuts, smaller is better: excess bytes, then the seconds of the simulated schedule."""
        if each.cuts not in self._steps:
            self._steps[each.cuts] = self._timer.seconds(self.table.stages(each.cuts, self.shape.blank))
        return (self._excess(each), self._steps[each.cuts])

    def _excess(self, each: Balance) -> float:
        return max(0.0, max(each.rank_bytes) - self.memory_bytes)

    @cached_property
    def _timer(self) -> StepTimer:
        waits = waits_for_sends(self.shape.schedule)
        lists = actions(self.shape.blank, self.shape.micro_batches)
        return StepTimer.of(lists, waits_for_sends=waits)

    def of(self, cuts: tuple[int, ...]) -> Balance:
        """These cuts with their seconds and bytes on every rank."""
        return self.of_all(np.array([cuts], dtype=int))[0]

    def of_all(self, cuts: np.ndarray) -> list[Balance]:
        """Several cuts, each with its seconds and bytes on every rank."""
        if not len(cuts):
            return []
        rows = zip(cuts.tolist(), *(each.tolist() for each in self._figures(cuts)), strict=True)
        return [Balance(tuple(each), tuple(busy), tuple(full)) for each, busy, full in rows]

    def _figures(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all ranks for several cuts, both of shape `(cuts, ranks)`."""
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, self.table.blocks))
        begin, end = edges[:, self._stages_of], edges[:, self._stages_of + 1]
        seconds = self._rank_seconds[np.arange(self.shape.ranks)[:, None], begin, end].sum(axis=-1)
        memories = self.table.saved_bytes, self.table.late_bytes
        saved, late = (np.moveaxis(each[begin, end], 1, 0) for each in memories)  # ranks, cuts, chunks
        flights, waiting = self.shape.flights
        held = (saved @ flights + late @ waiting).max(axis=-1).T
        held += self.table.kept_bytes[begin, end].sum(axis=-1)
        versions = self.versions[self._stages_of] * self.table.version_bytes[begin, end]
        held += versions.sum(axis=-1)
        held += self.table.transient_bytes[begin, end].max(axis=-1)
        return seconds, held

    @cached_property
    def _stages_of(self) -> np.ndarray:
        """The stages of every rank, of shape `(ranks, chunks)`."""
        return np.array(self.shape.stages_of)

    def does_not_fit(self, least: Balance, reserved_bytes: int) -> MemoryBoundError:
        """The error that says which rank of the least overfull cuts is too full, and with what."""
        rank = int(np.argmax(least.rank_bytes))
        edges = list(itertools.pairwise((0, *least.cuts, self.table.blocks)))
        stages = self.shape.blank.stages_of(rank)
        words = "; ".join(self._held_words(stage, edges[stage]) for stage in stages)
        held = f"; {_bytes(reserved_bytes)} reserved" if reserved_bytes else ""
        again = ["recompute='full'"] if self.table.recompute != "full" else []
        taken, bound = (x + reserved_bytes for x in (least.rank_bytes[rank], self.memory_bytes))
        whole = f"It does not fit into {_bytes(bound)}: a rank takes "
        cut = (
            f"No cuts into {self.shape.stages} stages fit into {_bytes(bound)} under "
            f"{self.shape.schedule}: in the smallest found pipeline rank {rank} takes "
        )
        more = "more ranks along pp or inside a stage" if self.shape.stages > 1 else "more ranks"
        return MemoryBoundError.of(
            f"{cut if self.shape.stages > 1 else whole}"
            f"{_bytes(taken)}, {_bytes(taken - bound)} too much ({words}{held}).",
            [*_remedies(self.shape), more, "a smaller micro-batch", *again],
            math.ceil(taken),
        )

    def _held_words(self, stage: int, edge: tuple[int, int]) -> str:
        table, parts = self.table, edge[1] - edge[0]  # blocks, and what comes before or after these
        flights = self.shape.in_flight()[stage]
        return (
            f"stage {stage} from {table.starts[edge[0]]}, {parts} of {counted(table.blocks, 'part')}: "
            f"{_bytes(table.kept_bytes[edge])} kept, {self._version_words(stage, edge)}{flights} x "
            f"{_bytes(table.saved_bytes[edge])} of micro-batches in flight, "
            f"{_bytes(table.transient_bytes[edge])} for a moment"
        )

    def _version_words(self, stage: int, edge: tuple[int, int]) -> str:
        count = int(self.versions[stage])
        return f"{count} x {_bytes(self.table.version_bytes[edge])} of older versions, " if count else ""


def _remedies(shape: Shape) -> list[str]:
    if shape.schedule == "gpipe" and shape.micro_batches > shape.ranks:
        return [f"schedule='1f1b', which holds at most {shape.ranks} of them at once"]
    return ["schedule='1f1b'"] if PLACEMENTS[shape.schedule] != "one" else []


def _bytes(size: float) -> str:
    return format_bytes(math.ceil(size))


# --- arithmetic: the best cuts for given seconds and bytes of blocks


def _is_less(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether `a` is smaller than `b` in the first figure in which they differ by more than rounding."""
    return next((x < y for x, y in zip(a, b, strict=True) if not math.isclose(x, y)), False)


def _windows_of(figures: np.ndarray, stages: int) -> np.ndarray:
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


def _best_cuts(seconds: np.ndarray, held: np.ndarray, bound: float) -> tuple[int, ...] | None:
    """The fastest cuts that fit; of equally fast ones the smallest, then the earliest; None if none fit."""
    weights = np.where(held <= bound, seconds, np.inf)
    slowest = _least_largest(weights)
    if not np.isfinite(slowest):
        return None
    weights = np.where(weights <= slowest * ROUNDING, held, np.inf)
    largest = _least_largest(weights)
    return _earliest(weights <= largest * ROUNDING)


def _least_largest(weights: np.ndarray) -> float:
    """The smallest possible weight of the heaviest stage, given those of all possible stages (see `_windows_of`)."""
    best = np.full(weights.shape[1], np.inf)
    best[0] = 0.0
    for stage in weights:
        best = np.maximum(best[:, None], stage).min(axis=0)
    return float(best[-1])


def _earliest(allowed: np.ndarray) -> tuple[int, ...]:
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
