"""Memory saved for backward of each micro-batch in flight, for all possible stages at once.

[Note: reach] The stage of blocks i to j - 1 holds a tensor if one of its blocks saves the tensor, or if it receives or
sends the tensor. For a fixed i the first condition is a threshold on j: j must exceed the index of the first block
from i on that saves the tensor. This index is the tensor's *reach* for i. The bytes of all stages follow from counting
reaches, in time proportional to tensors times blocks, not tensors times stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autopar.pipeline.stretches import Turn, following, largest


class SavedMemory(NamedTuple):
    """A tensor's memory that is saved for backward, with the blocks of the whole model that save it.

    Attributes:
        bytes: size of the memory.
        kept: blocks that save it if they are not recomputed.
        entering: blocks that save it if they are recomputed, for example because it enters them.
        spans: pairs of the block that computes it and the last block that uses it, if later blocks use it.
    """

    bytes: float
    kept: tuple[int, ...]
    entering: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class SavedBytes:
    """Bytes saved for backward, and the largest transient bytes, of all possible stages.

    Args:
        memories: the memory that is saved for backward.
        moments: transient bytes of every block without recomputation.
        repeating: for every block whether it may be recomputed.
        keeps_part: whether recomputed blocks keep some of the tensors that they compute, as with selected ops.
    """

    def __init__(
        self, memories: Sequence[SavedMemory], moments: np.ndarray, repeating: np.ndarray, *, keeps_part: bool
    ) -> None:
        self._moments, self._repeating = moments, repeating
        n = self._n = len(moments)
        self._once, self._again = np.zeros(n), np.zeros(n)
        self._made, self._alone = np.zeros(n), np.zeros(n)
        for each in memories:
            if each.kept:
                is_kept = keeps_part and each.kept[0] in each.entering
                self._made[each.kept[0]] += 0 if is_kept else each.bytes
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
        """Bytes of a micro-batch in flight: tensors that ops save, and tensors that a stage received and sent.

        Args:
            turn: for every stage, the block at which recomputation ends.
        """
        return self._of_shared(turn) + turn.first(self._again) + turn.then(self._once)

    def transient(self, turn: Turn) -> np.ndarray:
        """The largest block's transient bytes: the loss or gathered parameters with gradients, and recomputed tensors.

        Recomputed tensors count only as far as they exceed the memory that later blocks have freed by then.
        """
        alone, beyond = self._largest
        return np.maximum(alone[turn.begins, turn.ends], beyond[turn.begins, turn.turns] - turn.then(self._alone))

    @cached_property
    def _largest(self) -> tuple[np.ndarray, np.ndarray]:
        """For every stage, the largest transient bytes of a block: without recomputation, and if all is recomputed."""
        again = (self._moments + self._made) * self._repeating
        return largest(self._moments), largest(again)

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array([each.bytes for each in self._shared], dtype=float)

    @cached_property
    def _following(self) -> tuple[np.ndarray, np.ndarray]:
        """For every shared tensor and block, the first block from there on that saves it; n + 1 if there is none.

        The first array is for recomputed blocks, the second for other blocks.
        """
        entering = [following(each.entering, self._n) for each in self._shared]
        kept = [following(each.kept, self._n) for each in self._shared]
        shape = len(self._shared), self._n + 1
        return np.array(entering, dtype=int).reshape(shape), np.array(kept, dtype=int).reshape(shape)

    @cached_property
    def _crosses(self) -> np.ndarray:
        """Whether a shared tensor crosses into each block from an earlier one."""
        found = np.zeros((len(self._shared), self._n + 1), dtype=bool)
        for crosses, each in zip(found, self._shared, strict=True):
            for made, last in each.spans:
                crosses[made + 1 : last + 1] = True
        return found

    def _of_shared(self, turn: Turn) -> np.ndarray:
        """Bytes of the tensors that several blocks save; see [Note: reach]."""
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
        """The reach of every shared tensor, for each first block of a stage; see [Note: reach]."""
        entering, kept = self._following
        recomputed = entering[:, begins]
        recomputed = np.where(recomputed < latest[begins], recomputed, self._n + 1)
        reach = np.minimum(recomputed, kept[:, latest[begins]])
        return np.where(self._crosses[:, begins], np.minimum(reach, begins), reach)


def _alike(memories: Sequence[SavedMemory]) -> Iterator[SavedMemory]:
    """Joins memories that are saved by the same blocks, and adds up their bytes."""
    sizes: dict[tuple[Any, ...], float] = {}
    for size, *where in memories:
        sizes[tuple(where)] = sizes.get(tuple(where), 0.0) + size
    for (kept, entering, spans), size in sizes.items():
        yield SavedMemory(size, kept, entering, spans)
