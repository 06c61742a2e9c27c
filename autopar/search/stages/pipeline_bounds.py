"""Bounds on the seconds and bytes of a pipeline, which cost less than to cut it and to simulate its schedule."""

from __future__ import annotations

import itertools
import math

from autopar.pipeline.schedules import splits_backward
from autopar.pipeline.stage_table import StageTable, WholeModel
from autopar.search.stages.shape import Shape

ROUNDING = 1 + 1e-9  # tolerance, because sums of the same seconds in another order differ


def mean_bytes(whole: WholeModel, shape: Shape) -> float:
    """A lower bound on the memory of the fullest rank, in bytes: the mean over the ranks."""
    return (whole.kept_bytes + min(shape.least_in_flight) * whole.saved_bytes) / shape.ranks


def may_fit(whole: WholeModel, shape: Shape, memory_bytes: float) -> bool:
    """Whether some cuts may fit, by the bytes of all blocks together; False only if no cuts fit.

    A rank that keeps k bytes, and saves s bytes of a micro-batch, takes at least k + f s if f micro-batches are in
    flight on each of its stages at once. Over all ranks k and s add up to those of the model. There is most room if
    the ranks with the largest f keep most.
    """
    kept, room = whole.kept_bytes, 0.0
    for flights in sorted(shape.least_in_flight, reverse=True):
        own = min(kept, max(memory_bytes, 0.0))
        kept -= own
        room += (memory_bytes - own) / flights if flights else math.inf
    return kept <= (ROUNDING - 1) * whole.kept_bytes and whole.saved_bytes <= room * ROUNDING


def shortest_seconds(whole: WholeModel, shape: Shape, alone: WholeModel) -> float:
    """A lower bound on the seconds of a step for all possible cuts.

    The rank with the slowest block is busy for at least m times the seconds of this block, with m micro-batches. Let T
    be the seconds of the model and L those of the step. On p ranks the busiest one takes L >= m T / p.

    If each rank has one stage and backward is not split, more is known. Rank r, which takes w_r seconds for a
    micro-batch, waits for x_r seconds: the forwards of the ranks before it come first, and their backwards last. So
    L >= x_r + m w_r. Since x_{r+1} = x_r + w_r, each rank leaves L - x_{r+1} >= (1 - 1/m) (L - x_r). After all p ranks
    x is T, so that L - T >= (1 - 1/m)^p L, which is L >= T / (1 - (1 - 1/m)^p). Ranks of several kinds of machines can
    make T shorter than it is on what they reach together, so that only L >= m T / p is known of them.

    Args:
        whole: costs of all blocks together.
        shape: the pipeline before it is cut.
        alone: costs of all blocks with the least recomputation that a block can have in any stage.
    """
    m = shape.micro_batches
    part = shape.ranks / m
    if shape.chunks == 1 and not splits_backward(shape.blank) and not whole.is_of_kinds:
        part = 1.0 - (1.0 - 1.0 / m) ** shape.ranks
    return max(whole.seconds / part, m * alone.block_seconds)


def least_seconds(table: StageTable, shape: Shape, cuts: tuple[int, ...]) -> float:
    """A lower bound on the seconds of a schedule with these cuts, without simulating it.

    A rank waits at the start until the first micro-batch has passed the ranks before it. At the end those ranks run the
    last backward after it. (If backwards are split into two halves, a rank may end with gradients of weights instead.)
    """
    edges = list(itertools.pairwise((0, *cuts, table.blocks)))
    tables = [table.on(shape.blank.rank_of(stage)) for stage in range(len(edges))]
    forward = [float(each.forward_seconds[edge]) for each, edge in zip(tables, edges, strict=True)]
    backward = [float(each.backward_seconds[edge]) for each, edge in zip(tables, edges, strict=True)]
    is_split = splits_backward(shape.blank)
    before = least = 0.0
    for rank, stages in enumerate(shape.stages_of):
        busy = shape.micro_batches * sum(forward[each] + backward[each] for each in stages)
        least = max(least, before + busy)
        before += forward[rank] + (0.0 if is_split else backward[rank])
        if rank + 1 < shape.ranks:
            crossed = edges[rank][1]
            sends = table.send_seconds[crossed], table.gradient_seconds[crossed]
            before += float(sends[0] + (0.0 if is_split else sends[1]))
    return least
