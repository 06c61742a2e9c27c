"""Where a rank stands in a ring: which block comes by when, and which rows lie where.

A causal mask hides the more from a query the earlier it is, so that a rank that has the last of n equal parts has
nearly twice its share to do. Rows are therefore dealt out: in 2 n chunks, of which rank i takes chunk i and chunk
2 n - 1 - i. Then every rank has as much to do as any other, with each block that comes by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Like = tuple[tuple[int, ...], torch.dtype]  # shape and element type of a tensor

ROWS = 2  # the dim of rows of all tensors here, of shape (batch, heads, rows, ..)


class Send(NamedTuple):
    """A block that a rank sends along an axis, while all other ranks send theirs.

    Attributes:
        axis: position of the axis in `RingPlace.sizes`.
        parts: tensors for every rank along the axis.
        coming: shapes and element types of the tensors that come from every rank along the axis.
        like: tensors of all element types that any rank sends.
    """

    axis: int
    parts: tuple[Tensors, ...]
    coming: tuple[tuple[Like, ...], ...]
    like: Tensors


T = TypeVar("T")
Arrival = Callable[[], Tensors]
Dialogue = Generator[Send, Arrival, T]


class RowRun(NamedTuple):
    """Consecutive rows of the whole tensor that one rank has.

    Attributes:
        first: index of the run's first row in the whole tensor.
        here: index of the same row in the rank's tensor.
        length: number of rows.
    """

    first: int
    here: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """These rows of the rank's tensor."""
        return x.narrow(ROWS, self.here, self.length)


class RingPlace(NamedTuple):
    """Position of one rank among the ranks that split the queries.

    Attributes:
        sizes: number of ranks along every axis that splits the queries, major first.
        turns: for every axis, whether it splits the keys, too, which then travel along it.
        position: position of the rank along every axis.
    """

    sizes: tuple[int, ...]
    turns: tuple[bool, ...]
    position: tuple[int, ...]

    @property
    def block(self) -> int:
        """Index of the rank's block of queries."""
        return _position(self.position, self.sizes)

    @property
    def blocks(self) -> int:
        """Number of blocks of queries."""
        return math.prod(self.sizes)

    def stops(self) -> Iterator[tuple[int, tuple[int, int] | None]]:
        """Every block of keys by its number, in the order in which the blocks reach this rank.

        With each block comes the axis and the shift by which it travels on, or None for the last block.
        """
        ring = [i for i, turns in enumerate(self.turns) if turns]
        sizes = [self.sizes[i] for i in ring]
        owner = [self.position[i] for i in ring]
        for axis, shift in route(sizes):
            yield _position(owner, sizes), (ring[axis], shift)
            owner[axis] = (owner[axis] - shift) % sizes[axis]
        yield _position(owner, sizes), None

    def way_home(self) -> list[tuple[int, int]]:
        """Axes and shifts from where a block stops last to where it came from."""
        moved = [0] * len(self.sizes)
        for _, move in self.stops():
            if move is not None:
                moved[move[0]] += move[1]
        back = [(axis, -shift % self.sizes[axis]) for axis, shift in enumerate(moved)]
        return [(axis, shift) for axis, shift in back if shift]

    def send(self, axis: int, shift: int, tensors: Tensors) -> Send:
        """Sends tensors to the rank `shift` places on along an axis, counted around."""
        size, own = self.sizes[axis], self.position[axis]
        parts: list[Tensors] = [()] * size
        coming: list[tuple[Like, ...]] = [()] * size
        parts[(own + shift) % size] = tensors
        coming[(own - shift) % size] = tuple((tuple(x.shape), x.dtype) for x in tensors)
        return Send(axis, tuple(parts), tuple(coming), tensors)


def _position(along_axes: Sequence[int], sizes: Sequence[int]) -> int:
    """The position among all ranks of a grid, in row-major order; 0 in a grid without axes."""
    return int(np.ravel_multi_index(tuple(along_axes), tuple(sizes))) if sizes else 0


def _along_axes(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The position along every axis of a grid of a rank that stands at `position` in row-major order."""
    return tuple(map(int, np.unravel_index(position, tuple(sizes))))


def route(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Steps (axis, shift) that lead through all ranks of a grid, each once.

    >>> route([3]), route([2, 3])
    ([(0, 1), (0, 1)], [(1, 1), (1, 1), (0, 1), (1, -1), (1, -1)])
    """
    if not sizes:
        return []
    along = [(axis + 1, shift) for axis, shift in route(sizes[1:])]
    back = [(axis, -shift) for axis, shift in reversed(along)]
    found = list(along)
    for i in range(1, sizes[0]):
        found += [(0, 1), *(back if i % 2 else along)]
    return found


# --- rows that are dealt out


def block_of_chunk(chunk: int, blocks: int) -> int:
    """The rank that a chunk is dealt to.

    >>> [block_of_chunk(chunk, 3) for chunk in range(6)]
    [0, 1, 2, 2, 1, 0]
    """
    return min(chunk, 2 * blocks - 1 - chunk)


def runs(number: int, rows: int, blocks: int, *, dealt: bool) -> list[RowRun]:
    """The rows of a block, which are one run, or two chunks if rows are dealt out.

    >>> runs(0, 4, 2, dealt=True)
    [RowRun(first=0, here=0, length=2), RowRun(first=6, here=2, length=2)]
    """
    if not dealt:
        return [RowRun(number * rows, 0, rows)]
    low, high = number, 2 * blocks - 1 - number
    return [
        RowRun(_first(low, rows), 0, _count(low, rows)),
        RowRun(_first(high, rows), _count(low, rows), _count(high, rows)),
    ]


def _first(chunk: int, rows: int) -> int:
    """The first row of a chunk; two make a block of the whole, whose rows may be odd."""
    return chunk // 2 * rows + chunk % 2 * (rows // 2)


def _count(chunk: int, rows: int) -> int:
    return _first(chunk + 1, rows) - _first(chunk, rows)


def deal(place: RingPlace, tensors: Tensors, *, back: bool = False) -> Dialogue[Tensors]:
    """The rank's chunks of tensors that lie in blocks, lower chunk first; or the other way `back`.

    Chunks go along the first axis to where they belong along it, then along the next.
    """
    rows, sizes = tensors[0].shape[ROWS], place.sizes
    homes = {c: _along_axes(c // 2, sizes) for c in range(2 * place.blocks)}
    hands = {c: _along_axes(block_of_chunk(c, place.blocks), sizes) for c in homes}
    at, to = (hands, homes) if back else (homes, hands)
    mine = [c for c in homes if at[c] == place.position]
    counts = [_count(c, rows) for c in mine]
    held = dict(zip(mine, zip(*(x.split(counts, ROWS) for x in tensors), strict=True), strict=True))
    for axis, size in enumerate(sizes):
        arrives = [c for c in homes if (*to[c][: axis + 1], *at[c][axis + 1 :]) == place.position]
        order = sorted(arrives, key=lambda c: (at[c][axis], c))
        parts = [[x for c in sorted(held) if to[c][axis] == i for x in held[c]] for i in range(size)]
        coming = [[c for c in order if at[c][axis] == i] for i in range(size)]
        likes = [[_like(x, _count(c, rows)) for c in each for x in tensors] for each in coming]
        arrival = yield Send(axis, tuple(map(tuple, parts)), tuple(map(tuple, likes)), tensors)
        flat = iter(arrival())
        held = {c: tuple(next(flat) for _ in tensors) for c in order}
    return tuple(torch.cat(x, ROWS) for x in zip(*(held[c] for c in sorted(held)), strict=True))


def _like(x: Tensor, rows: int) -> Like:
    return (*x.shape[:ROWS], rows, *x.shape[ROWS + 1 :]), x.dtype
