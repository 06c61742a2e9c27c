"""Seconds of all possible stages: forward, backward, recomputation, and work once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.cost_model.items import COMPUTE, WorkItem, kind_of_work
from autopar.cost_model.memory import Selected
from autopar.cost_model.steps.run import REGIONS
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.split_seconds import SplitSeconds
from autopar.pipeline.stretches import Turn, ratio

_Columns = Sequence[np.ndarray]  # seconds of every stage, by column of a block's work

# Columns of the seconds of a block in one direction: computation; communication of parameters and gradients;
# communication of activations; waiting for the host, op by op; the excess of launching over running (it may be
# negative), which counts if the host launches kernels ahead of the device; and moves between memories.
_COMPUTE, _STORED, _ACTIVATIONS, _WAITS, _AHEAD, _MOVES = range(6)
_COLUMNS = {"stored": _STORED, "activation": _ACTIVATIONS, "move": _MOVES}


class BlockWork(NamedTuple):
    """Work of every block for one micro-batch, by region of the model and column.

    Attributes:
        forward: seconds of forward, of shape `(n, 3, 6)`.
        backward: seconds of backward, of shape `(n, 3, 6)`.
        recomputed: seconds that backward takes more if the block is recomputed, of shape `(n, 3, 6)`.
        weights: seconds of the second half of a backward in two halves, of shape `(n,)`.
        split: seconds that both halves take beyond a whole backward, of shape `(n,)`.
        once: seconds of gathers and moves between memories, and of reductions, once per step, of shape `(n, 2)`.
    """

    forward: np.ndarray
    backward: np.ndarray
    recomputed: np.ndarray
    weights: np.ndarray
    split: np.ndarray
    once: np.ndarray

    @classmethod
    def nothing(cls, blocks: int) -> BlockWork:
        """Work of no seconds."""
        shape = (blocks, len(REGIONS), 6)
        zeros = (np.zeros(shape), np.zeros(shape), np.zeros(shape))
        return cls(*zeros, np.zeros(blocks), np.zeros(blocks), np.zeros((blocks, 2)))


class StageSeconds:
    """Seconds of a plan's stages.

    Args:
        blocks: the plan's items by block.
    """

    def __init__(self, blocks: PricedBlocks) -> None:
        self.blocks = blocks

    @cached_property
    def work(self) -> BlockWork:
        """Work of every block of the whole model."""
        work = BlockWork.nothing(self.blocks.n)
        for item in self.blocks.items:
            (rows, share), region = self.blocks.rows_of(item), REGIONS.index(item.region)
            if item.phase in ("gather", "reduce", "update") and not item.every_micro_batch:
                once = share * item.count * item.seconds
                work.once[rows, int(item.phase == "reduce" and kind_of_work(item) == "stored")] += once
                continue
            row = share * self._row(item)
            (work.forward if item.phase == "forward" else work.backward)[rows, region] += row
            work.recomputed[rows, region] += item.recomputed * row
            if item.phase != "forward":
                halves = self._split.halves(item)
                work.weights[rows] += share * item.count * halves.second_seconds
                work.split[rows] += share * item.count * halves.extra_seconds
        return work

    @cached_property
    def _split(self) -> SplitSeconds:
        return SplitSeconds(self.blocks.graph, self.blocks.hardware)

    def recomputed_work(self, selected: Selected) -> np.ndarray:
        """Work of every block's selected ops, of the shape of `BlockWork.recomputed`."""
        work = np.zeros_like(self.work.recomputed)
        for item in self.blocks.items:
            if selected.repeats(item.of, item.moves, item.phase, item.carries):
                rows, share = self.blocks.rows_of(item)
                work[rows, REGIONS.index(item.region)] += share * self._row(item)
        return work

    def _row(self, item: WorkItem) -> np.ndarray:
        """Seconds of an item, by column of a block's work."""
        row = np.zeros(6)
        seconds = item.count * item.seconds
        late = item.count * (self.blocks.step.issue_seconds(item) - item.seconds)
        if item.resource == COMPUTE:
            row[_COMPUTE] = seconds
        else:
            exposed = seconds - item.count * item.hidden_seconds
            row[_COLUMNS[kind_of_work(item)]] = exposed
        row[_WAITS] = max(0.0, late) if item.kernels else 0.0
        # The host must also issue what the device hides behind compute.
        row[_AHEAD] = late + (0.0 if item.resource == COMPUTE else item.count * item.hidden_seconds)
        return row

    def directions(self, turn: Turn, recomputed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of forward, of backward, and of the computation of backward, of every stage.

        The communication that overlaps with compute is computed for both directions together, region by region, as in
        `autopar.cost_model.steps.step`. Each direction gets a part of it in proportion to its communication.

        Args:
            turn: for every stage, the block at which recomputation ends.
            recomputed: work of every recomputed block, of the shape of `BlockWork.recomputed`.
        """
        found = np.zeros((3, *turn.turns.shape))
        for region in range(len(REGIONS)):
            there, back, again = (work[:, region] for work in (self.work.forward, self.work.backward, recomputed))
            if there.any() or back.any() or again.any():
                forward = _columns(turn.sums, there)
                backward = [a + b for a, b in zip(_columns(turn.sums, back), _columns(turn.first, again), strict=True)]
                found[:2] += self._exposed(forward, backward)
                found[2] += backward[_COMPUTE]
        return found[0], found[1], found[2]

    def _exposed(self, forward: _Columns, backward: _Columns) -> np.ndarray:
        """Seconds of forward and backward in one region, without hidden communication, given its work by column."""
        software = self.blocks.software
        compute, stored, activations, waiting, ahead, _ = both = [a + b for a, b in zip(forward, backward, strict=True)]
        own = self.blocks.step.hides_stored * np.minimum(stored, compute)
        other = software.hides_activations * np.minimum(activations, compute)
        each = 0.0 if software.runs_ahead else waiting
        late, device = np.maximum(0, ahead + own + other - each), _busy(both)

        def seconds(work: _Columns) -> np.ndarray:
            hidden = own * ratio(work[_STORED], stored)
            hidden = hidden + other * ratio(work[_ACTIVATIONS], activations)
            busy = _busy(work)
            waits = 0.0 if software.runs_ahead else work[_WAITS]
            return np.asarray(busy - hidden + waits + late * ratio(busy, device))

        # A direction without work in this region has one zero for all stages.
        return np.stack(np.broadcast_arrays(seconds(forward), seconds(backward)))

    def once(self, once: np.ndarray, computing: np.ndarray) -> np.ndarray:
        """Seconds of gathers and reductions once a step, of shape `(n + 1, n + 1)`.

        Args:
            once: seconds of gathers and moves between memories, and of reductions, of shape `(n + 1, n + 1, 2)`.
            computing: seconds of the computation of backward, which hides reductions, of shape `(n + 1, n + 1)`.
        """
        gathers, reductions = np.moveaxis(once, -1, 0)
        return gathers + reductions - self.blocks.step.hides_stored * np.minimum(reductions, computing)


def _columns(over: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> _Columns:
    """Every column of work over stages; 0 for one without work."""
    return [over(column) if column.any() else np.zeros(()) for column in rows.T]


def _busy(work: _Columns) -> np.ndarray:
    return np.asarray(work[_COMPUTE] + work[_STORED] + work[_ACTIVATIONS] + work[_MOVES])
