"""Sizes that differ between ranks: what each rank has of a dim that an axis does not divide.

A plan has one program for all ranks. Where 3 ranks split 32 rows, a shape in it is (Share(11, 11, 10), 64): as a number
that of rank 0, which has a largest part, and `on(shape, rank)` is the shape of each rank. Programs and conversions are
made in such sizes, and become those of one rank where they are bound to it or simulated on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Share(int):
    """A size by rank. Sums, products and quotients of shares are those of every rank.

    Attributes:
        by_rank: the size on every rank of the mesh, of which some differ.
    """

    by_rank: tuple[int, ...]

    @staticmethod
    def of(by_rank: Iterable[int]) -> int:
        """The share of these sizes; a plain number where all ranks have the same.

        >>> Share.of([11, 11, 10]) * 2, Share.of([4, 4])
        (Share(22, 22, 20), 4)
        """
        sizes = tuple(by_rank)
        return Share(*sizes) if len({*sizes}) > 1 else sizes[0]

    def __new__(cls, *by_rank: int) -> Share:
        found = super().__new__(cls, by_rank[0])
        found.by_rank = by_rank
        return found

    def __reduce__(self) -> tuple[type[Share], tuple[int, ...]]:
        return Share, self.by_rank

    def __repr__(self) -> str:  # no number, so that the text of a graph that is not bound to a rank cannot run
        return f"Share{self.by_rank}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and self.by_rank == other.by_rank

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.by_rank)

    def _with(self, other: Any, combine: Callable[[int, int], int]) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        others = other.by_rank if isinstance(other, Share) else (other,) * len(self.by_rank)
        return Share.of(map(combine, self.by_rank, others))

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda own, left: left - own)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, operator.mul)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        return self._with(other, operator.mod)

    def __neg__(self) -> Any:
        return Share.of(-size for size in self.by_rank)

    __radd__, __rmul__ = __add__, __mul__


def on(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape on one rank.

    >>> on((Share(2, 2, 1), 8), 2)
    (1, 8)
    """
    return tuple(size_on(size, rank) for size in shape)


def size_on(size: Any, rank: int) -> Any:
    """A size on one rank; what is no share is the same on all.

    >>> size_on(Share(2, 2, 1), 2), size_on(7, 2)
    (1, 7)
    """
    return size.by_rank[rank] if isinstance(size, Share) else size
