"""The costs of all possible stages, as arrays indexed by a stage's first block and the block after its last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.ir.pipeline import Pipeline
from autopar.ir.recompute import Recompute
from autopar.pipeline.simulation import StageCosts


class WholeModel(NamedTuple):
    """Costs of all blocks together, which bound the costs of any cuts into stages.

    Attributes:
        seconds: forward and backward of a micro-batch, if all blocks are one stage.
        block_seconds: forward and backward of a micro-batch, if the slowest block is a stage by itself.
        kept_bytes: parameters, gradients, optimizer states and buffers of all blocks.
        saved_bytes: saved activations of a micro-batch in all blocks.
        is_of_kinds: whether ranks have several kinds of machines. The seconds of all blocks are then those of what they
            reach together, and those of the slowest block are those of the machine on which it is fastest.
    """

    seconds: float
    block_seconds: float
    kept_bytes: float
    saved_bytes: float
    is_of_kinds: bool = False


@dataclass(frozen=True)
class StageTable:
    """Costs of all possible stages: arrays of shape `(n + 1, n + 1)`, with the stage of blocks i to j - 1 at `[i, j]`.

    Attributes:
        starts: name of the first op of every block.
        recompute: number of a stage's blocks that are recomputed in backward, or a selection of their ops.
        repeating: for every block whether it may be recomputed.
        forward_seconds: forward of one micro-batch, without communication that overlaps with compute.
        backward_seconds: backward of one micro-batch, without communication that overlaps with compute.
        weight_seconds: second half of a backward in two halves, which computes gradients of parameters; 0 where all of
            the backward runs in the first half.
        split_seconds: duration of both halves of a backward, beyond that of a whole one.
        once_seconds: gathers, reductions and the optimizer, once for every update.
        saved_bytes: saved activations of each micro-batch in flight.
        late_bytes: bytes of each micro-batch between the two halves of its backward.
        kept_bytes: parameters, gradients, optimizer states and buffers.
        version_bytes: one version of the parameters; a schedule without a flush keeps several.
        transient_bytes: memory that exists only while a block runs, for the block with most.
        sent_bytes: bytes that a stage beginning with block k receives, at `[k]`, of shape `(n + 1,)`.
        gradient_bytes: bytes of gradients that a stage beginning with block k sends back, at `[k]`, of shape `(n +
            1,)`.
        send_seconds: duration of sending those bytes, of shape `(n + 1,)`.
        gradient_seconds: duration of sending those gradients, of shape `(n + 1,)`.
        of_ranks: the tables of all pipeline ranks, if their machines differ; seconds of this table are then those of no
            rank, but of what the machines reach together. () where all ranks have one machine.
    """

    starts: tuple[str, ...]
    recompute: Recompute
    repeating: tuple[bool, ...]
    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    weight_seconds: np.ndarray
    split_seconds: np.ndarray
    once_seconds: np.ndarray
    saved_bytes: np.ndarray
    late_bytes: np.ndarray
    kept_bytes: np.ndarray
    version_bytes: np.ndarray
    transient_bytes: np.ndarray
    sent_bytes: np.ndarray
    gradient_bytes: np.ndarray
    send_seconds: np.ndarray
    gradient_seconds: np.ndarray
    of_ranks: tuple[StageTable, ...] = ()

    def on(self, rank: int) -> StageTable:
        """The table of stages on a pipeline rank."""
        return self.of_ranks[rank] if self.of_ranks else self

    @property
    def blocks(self) -> int:
        return len(self.starts)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of a micro-batch: forward, backward and sending both ways; inf where `i >= j`."""
        whole = self.forward_seconds + self.backward_seconds
        whole = whole + self.send_seconds[None, :] + self.gradient_seconds[:, None]
        begin, end = np.indices(whole.shape)
        return np.where(begin < end, whole, np.inf)

    @property
    def whole(self) -> WholeModel:
        """Costs of all blocks together."""
        both, all_blocks = self.forward_seconds + self.backward_seconds, (0, self.blocks)
        slowest = float(np.diagonal(both, offset=1).max())
        slowest = min((each.whole.block_seconds for each in self.of_ranks), default=slowest)
        kept, saved = float(self.kept_bytes[all_blocks]), float(self.saved_bytes[all_blocks])
        return WholeModel(float(both[all_blocks]), slowest, kept, saved, bool(self.of_ranks))

    def most_repeating(self, cuts: Sequence[int]) -> int:
        """The largest number of blocks of a stage that may be recomputed."""
        edges = (0, *cuts, self.blocks)
        return max(sum(self.repeating[i:j]) for i, j in itertools.pairwise(edges))

    def stage(self, begin: int, end: int) -> StageCosts:
        """Costs of the stage with the blocks `begin` to `end` - 1, for the simulation."""
        at = begin, end
        return StageCosts(
            forward_seconds=float(self.forward_seconds[at]),
            backward_seconds=float(self.backward_seconds[at]),
            weight_seconds=float(self.weight_seconds[at]),
            split_seconds=float(self.split_seconds[at]),
            saved_bytes=float(self.saved_bytes[at]),
            late_bytes=float(self.late_bytes[at]),
            working_bytes=float(self.transient_bytes[at]),
            kept_bytes=float(self.kept_bytes[at]),
            version_bytes=float(self.version_bytes[at]),
            update_seconds=float(self.once_seconds[at]),
            send_forward_seconds=float(self.send_seconds[end]),
            send_backward_seconds=float(self.gradient_seconds[begin]),
        )

    def stages(self, cuts: Sequence[int], pipeline: Pipeline | None = None) -> tuple[StageCosts, ...]:
        """Costs of all stages.

        Args:
            cuts: index of the first block of every stage but the first.
            pipeline: what says which rank runs a stage, whatever its own cuts; None where all ranks have one machine.
        """
        edges = itertools.pairwise((0, *cuts, self.blocks))
        if pipeline is None:
            assert not self.of_ranks, "stages on different machines are those of a pipeline"
            return tuple(self.stage(i, j) for i, j in edges)
        return tuple(self.on(pipeline.rank_of(stage)).stage(i, j) for stage, (i, j) in enumerate(edges))
