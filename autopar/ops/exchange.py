"""Defines the exchange of rows for experts, `dispatch` and its transpose `combine`, for all ranks at once.

Every rank has rows sorted by expert, and the experts lie in equal blocks on the ranks of a group. `dispatch` brings
each row to the rank of its expert, where rows lie sorted by expert and then by the rank that they came from; `combine`
brings them back to where they were. The numbers of rows are known only at run time; a table holds them.

    table      counts[0] and counts[1], of shape (ranks, experts of a rank): rows that this rank sends to each expert of
               each rank, and rows that each rank sends to each of its experts; on the host, before anything is sent
    dispatch   rows by (rank, expert) -> rows by (expert, rank)
    combine    rows by (expert, rank) -> rows by (rank, expert)

The gradient of one is the other, with the same table. No row is dropped, and no padding is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EXCHANGES = ("dispatch", "combine")  # each the transpose of the other


def table_of(counts: Tensor, size: int) -> Tensor:
    """The counts as a table of shape (2, ranks, experts of a rank).

    Args:
        counts: rows sent and rows received, of shape (2, experts of all ranks).
        size: number of ranks.
    """
    return counts.view(2, size, -1)


def pieces(rows: Tensor, table: Tensor) -> list[list[Tensor]]:
    """Rows cut into runs, by the first and second index of a table with the length of each run.

    >>> [[len(x) for x in line] for line in pieces(torch.zeros(6, 2), torch.tensor([[1, 2], [0, 3]]))]
    [[1, 2], [0, 3]]
    """
    cut = iter(rows.split(table.flatten().tolist()))
    return [[next(cut) for _ in range(table.shape[1])] for _ in range(table.shape[0])]


def turned(rows: Tensor, table: Tensor) -> Tensor:
    """Rows that lie by the first index of a table and then by the second -> by the second and then by the first."""
    if 1 in table.shape:
        return rows
    return torch.cat([x for line in zip(*pieces(rows, table), strict=True) for x in line])


def dispatched(ranks: Sequence[Tensor], tables: Sequence[Tensor], position: int) -> Tensor:
    """The rows that one rank of a group receives, given the rows and tables of all ranks.

    Args:
        ranks: every rank's rows.
        tables: every rank's table, as `table_of` gives it.
        position: position of the rank that gets them.
    """
    found = [pieces(x, table[0])[position] for x, table in zip(ranks, tables, strict=True)]  # of every rank, by expert
    return torch.cat([x for line in zip(*found, strict=True) for x in line])


def combined(ranks: Sequence[Tensor], tables: Sequence[Tensor], position: int) -> Tensor:
    """The transpose of `dispatched`: the rows that one rank gets back from the experts' ranks."""
    found = [[line[position] for line in pieces(x, table[1].t())] for x, table in zip(ranks, tables, strict=True)]
    return torch.cat([x for line in found for x in line])
