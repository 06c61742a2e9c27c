"""Memory that stays of every micro-batch in flight, of all stages at once.

[Note: reach] A stage from block i up to block j holds a tensor if it has a block that keeps it, or if it receives or
sends it. For one tensor and one i the first kind is a threshold: the stage has such a block if j is beyond the first
one. So a tensor is known by one number for every block, its reach, and stages are summed up by counting reaches:
that takes time in proportion to tensors times blocks, not to tensors times stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autopar.pipeline.stretches import Turn, following, largest


class Staying(NamedTuple):
    """Memory that stays for backward, in blocks of the whole model.

    Attributes:
        bytes: its size.
        kept: blocks that keep it where nothing is recomputed.
        entering: blocks that keep it where they are recomputed: it enters them.
        spans: pairs of the block that makes it and the last block that uses it, where it crosses between blocks.
    """

    bytes: float
    kept: tuple[int, ...]
    entering: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class StayingBytes:
    """Bytes that stay for backward, and the most that recomputed blocks have for a moment.

    Args:
        memories: the memory that stays.
        moments: bytes that every block has for a moment, where nothing is recomputed.
        repeating: for every block whether it may be recomputed.
        keeps_part: whether recomputed blocks keep some of their tensors, as with selected ops.
    """

    def __init__(
        self, memories: Sequence[Staying], moments: np.ndarray, repeating: np.ndarray, *, keeps_part: bool
    ) -> None:  # fmt: skip
        self._moments, self._repeating = moments, repeating
        n = self._n = len(moments)
        self._once, self._again = np.zeros(n), np.zeros(n)
        self._made, self._alone = np.zeros(n), np.zeros(n)
        for each in memories:
            if each.kept:
                stays = keeps_part and each.kept[0] in each.entering
                self._made[each.kept[0]] += 0 if stays else each.bytes
                if len(each.kept) == 1 and not each.spans:
                    self._alone[each.kept[0]] += each.bytes
        self._shared = []
        for each in _alike(memories):
            if not each.spans and len({*each.kept, *each.entering}) == 1:
                # It is in one sum or in the other.
                self._once[list(each.kept)] += each.bytes
                self._again[list(each.entering)] += each.bytes
            else:
                self._shared.append(each)

    def saved(self, turn: Turn) -> np.ndarray:
        """Bytes that stay of a micro-batch: tensors that ops keep, and values that a stage received and sent.

        Args:
            turn: the block at which recomputation ends of every stage; begins are rows, ends are columns.
        """
        return self._of_shared(turn) + turn.first(self._again) + turn.then(self._once)

    def transient(self, turn: Turn) -> np.ndarray:
        """The largest block's transient bytes: the loss or gathered parameters with gradients, and recomputed tensors.

        Recomputed tensors count only as far as they exceed the memory that later blocks have freed by then.
        """
        alone, beyond = self._largest
        return np.maximum(
            alone[turn.begins, turn.ends],
            beyond[turn.begins, turn.turns] - turn.then(self._alone),
        )

    @cached_property
    def _largest(self) -> tuple[np.ndarray, np.ndarray]:
        """The largest block for a moment of every stage: where nothing and where all of it is recomputed."""
        again = (self._moments + self._made) * self._repeating
        return largest(self._moments), largest(again)

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([each.bytes for each in self._shared], dtype=float)

    @cached_property
    def _following(self) -> tuple[np.ndarray, np.ndarray]:
        """For every shared tensor the first block from each on that has it, recomputed and not, and n + 1 for none."""
        entering = [following(each.entering, self._n) for each in self._shared]
        kept = [following(each.kept, self._n) for each in self._shared]
        shape = len(self._shared), self._n + 1
        return np.array(entering, dtype=int).reshape(shape), np.array(kept, dtype=int).reshape(
            shape
        )

    @cached_property
    def _crosses(self) -> np.ndarray:
        """Whether a shared tensor crosses into each block from an earlier one."""
        found = np.zeros((len(self._shared), self._n + 1), dtype=bool)
        for crosses, each in zip(found, self._shared, strict=True):
            for made, last in each.spans:
                crosses[made + 1 : last + 1] = True
        return found

    def _of_shared(self, turn: Turn) -> np.ndarray:
        """Bytes of the tensors that several blocks share; see [Note: reach]."""
        begins, ends = turn.begins.reshape(-1), turn.ends.reshape(-1)
        reach = self._reach(turn.latest, begins)
        rows, width = len(begins), self._n + 2
        places = np.arange(rows) * width + reach
        sizes = np.broadcast_to(self._sizes[:, None], reach.shape)
        counted = np.bincount(places.ravel(), sizes.ravel(), rows * width).reshape(rows, width)
        within = np.concatenate([np.zeros((rows, 1)), np.cumsum(counted, axis=1)], axis=1)
        total = within[:, ends]
        # Beyond its reach a stage is counted; one that ends before it may still send the tensor.
        which, at = np.nonzero(self._crosses[:, ends])
        sends = (begins < ends[at, None]) & (ends[at, None] <= reach[which])
        np.add.at(total.T, at, sends * self._sizes[which, None])
        return total

    def _reach(self, latest: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """For every shared tensor and first block of a stage the block that the stage must end after to hold it."""
        entering, kept = self._following
        recomputed = entering[:, begins]
        recomputed = np.where(recomputed < latest[begins], recomputed, self._n + 1)
        reach = np.minimum(recomputed, kept[:, latest[begins]])
        return np.where(self._crosses[:, begins], np.minimum(reach, begins), reach)


def _alike(memories: Sequence[Staying]) -> Iterator[Staying]:
    """Yields the memory that stays for the same blocks, summed up."""
    sizes: dict[tuple[Any, ...], float] = {}
    for size, *where in memories:
        sizes[tuple(where)] = sizes.get(tuple(where), 0.0) + size
    for (kept, entering, spans), size in sizes.items():
        yield Staying(size, kept, entering, spans)
