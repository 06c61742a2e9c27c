"""Exchanges rows of a mixture of experts, so that each rank runs its own experts on all rows that go to them.

Along an axis with the choice `t>e` a rank has its part of the tokens, and the matrices of its part of the experts. It
sorts its rows by expert, tells every other rank how many it will send to each expert there (an all-to-all of counts),
and sends them (`dispatch`). Rows arrive sorted by expert, so the grouped products run on them at once. The results go
back the same way (`combine`). Messages have the sizes of the run: no row is dropped, and none is added as padding.

Over several such axes rows travel along one axis after the other. After the first they are sorted by the experts of the
ranks that share them, as the second axis needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ops.nodes import draws
from autopar.rules import operator_name
from autopar.rules.spec import Letters, Local, StatedCollective

aten = torch.ops.aten
ours = torch.ops.autopar
Emit = Callable[..., Any]

# They create tensors of a given size, and here sizes are known only at run time.
_SIZED = frozenset({"aten.new_zeros", "aten.new_ones", "aten.new_full"})


class Exchange:
    """Writes the exchange of sorted rows with the ranks of their experts into the graph of one rank.

    Args:
        emit: function that adds a call to the graph of the rank.
        axes: names and sizes of the axes, in the order in which they split the experts.
    """

    def __init__(self, emit: Emit, axes: Sequence[tuple[str, int]]) -> None:
        self.emit, self.axes = emit, tuple(axes)
        self._tables: list[Any] = []  # of every axis

    def dispatch(self, rows: Sequence[Any], ends: Any) -> tuple[list[Any], Any, Any]:
        """Sorted rows and the ends of experts' rows -> arrived rows, their experts, and the ends of these."""
        found, counts = list(rows), self._counts(ends)
        for axis, size in self.axes:
            received = self.emit(ours.all_to_all.default, counts, [0, 0], size, axis, "all_to_all")
            both = self.emit(aten.stack.default, [counts, received])
            table = self.emit(ours.on_host.default, both)
            self._tables.append(table)
            found = [self._move("dispatch", x, table, axis, size, "combine") for x in found]
            lines = self.emit(aten.view.default, received, [size, -1])
            counts = self.emit(aten.sum.dim_IntList, lines, [0], dtype=torch.int32)
        ends = self.emit(aten.cumsum.default, counts, 0, dtype=torch.int32)
        return found, self._experts_of(found[0], ends), ends

    def _experts_of(self, rows: Any, ends: Any) -> Any:
        """The expert of every row, counted from the first of this rank."""
        ones = self.emit(aten.new_ones.default, ends, [self.emit(aten.sym_size.int, rows, 0)])
        places = self.emit(aten.sub.Scalar, self.emit(aten.cumsum.default, ones, 0), 1)
        return self.emit(aten.searchsorted.Tensor, ends, places, right=True)

    def combine(self, rows: Any) -> Any:
        """Results of the arrived rows -> results on the ranks from which the rows came."""
        for (axis, size), table in reversed([*zip(self.axes, self._tables, strict=True)]):
            rows = self._move("combine", rows, table, axis, size, "dispatch")
        return rows

    def _counts(self, ends: Any) -> Any:
        """Number of rows of every expert."""
        first = self.emit(aten.new_zeros.default, ends, [1])
        return self.emit(aten.diff.default, ends, 1, 0, first)

    def _move(self, name: str, rows: Any, table: Any, axis: str, size: int, backward: str) -> Any:
        return self.emit(getattr(ours, name).default, rows, [], size, axis, backward, table)


def marked(local: Local) -> Emit:
    """A function that adds calls whose sizes no compiler may assume, see `autopar.passes.cut_regions`."""

    def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
        node = local.emit(target, *args, **kwargs)
        node.meta["sized_by_values"] = True
        return node

    return emit


def can_be_exchanged(calls: Sequence[fx.Node], tensors: Sequence[Letters], rows: set[str]) -> bool:
    """Whether the ops of a layer run on any number of rows.

    Args:
        calls: calls between the two permutations.
        tensors: letters of their operands and results.
        rows: letters of the rows.
    """
    if any(draws(node) or operator_name(node) in _SIZED for node in calls):
        return False
    return all(sum(not rows.isdisjoint(dim) for dim in letters) <= 1 for letters in tensors)


def stated(
    pairs: Sequence[tuple[str, str]],
    moved: Sequence[tuple[Letters, int, bool]],
    result: tuple[Letters, int, bool],
    experts: int,
) -> tuple[StatedCollective, ...]:
    """The messages of an exchange along an axis: counts of rows, then rows, and their results on the way back.

    Args:
        pairs: letters of rows and of experts that a choice exchanges.
        moved: letters of every operand's rows, the bytes of a number, and whether a gradient goes back to it.
        result: the same for the result.
        experts: number of experts.
    """
    over = frozenset(f"{rows}>{groups}" for rows, groups in pairs)
    if not over:
        return ()

    def row(name: str, backward: str, each: tuple[Letters, int, bool]) -> StatedCollective:
        letters, size, takes_gradient = each
        flat = tuple(x for dim in letters for x in dim)
        return StatedCollective(over, name, backward if takes_gradient else "", flat, size)

    return (
        StatedCollective(over, "all_to_all", "", (), 4 * experts),
        *(row("dispatch", "combine", each) for each in moved),
        row("combine", "dispatch", result),
    )
