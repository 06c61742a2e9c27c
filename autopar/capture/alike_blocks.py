"""Finds blocks of calls in an exported graph that are alike and follow each other, such as the layers of a transformer.

    %a1 = linear(%a0, %w0); %b1 = relu(%a1); %a2 = linear(%b1, %w1); %b2 = relu(%a2); ...
    -> blocks [[%a1, %b1], [%a2, %b2], ...]

Blocks are alike if their calls have, one by one, the same op, the same plain arguments, results of the same kind, and
operands that correspond. An operand corresponds to that of the next block in one of three ways (`_OperandRole`): both
blocks read one and the same value; each reads a result at the same place of its own or its previous block; each reads
a parameter or buffer, which are of one kind.

Only functional ops of torch without open sizes are compared, so that a block depends on nothing but its operands.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.ops.call_kinds import arguments_of, is_like, kind_of, writes_nothing

_FEWEST = 4  # blocks that are worth the search
_PERIODS = 8  # lengths of blocks that are tried, the most frequent first


@dataclass(frozen=True)
class AlikeBlocks:
    """Blocks of calls that are alike.

    Attributes:
        blocks: calls of every block, in the order of the graph; all have the same number of calls.
        given: for every block, the parameters, buffers and inputs that it reads, by those that the first one reads.
    """

    blocks: Sequence[Sequence[fx.Node]]
    given: Sequence[dict[fx.Node, fx.Node]]


def find_alike_blocks(graph: fx.Graph) -> AlikeBlocks | None:
    """The blocks that are alike; where there are several rows of such blocks, the row with most calls."""
    calls = _CallKinds([node for node in graph.nodes if node.op not in ("placeholder", "output")])
    rows = [row for length in calls.periods() if (row := calls.longest_row(length)) is not None]
    for row in sorted(rows, key=lambda row: row.saved, reverse=True):
        found = row.blocks()
        if found is not None:
            return found
    return None


class _OperandRole(enum.Enum):
    """How an operand of a block corresponds to that of the next one."""

    SHARED = enum.auto()  # both read the same value
    MOVED = enum.auto()  # the one of the next block is as many calls later as a block has
    OWN = enum.auto()  # both are parameters or buffers


class _CallKinds:
    """The calls of a graph, with what decides whether two of them are alike."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.place = {node: i for i, node in enumerate(nodes)}
        described = [_described(node) for node in nodes]
        numbers: dict[Hashable, int] = {}
        # A call that cannot be compared has a number of its own.
        self.kinds = [
            -1 - i if kind is None else numbers.setdefault(kind, len(numbers)) for i, (kind, _) in enumerate(described)
        ]
        self.operands = [operands for _, operands in described]

    def periods(self) -> list[int]:
        """The most frequent distances between a call and the one before that looks like it."""
        latest: dict[int, int] = {}
        distances: collections.Counter[int] = collections.Counter()
        for i, kind in enumerate(self.kinds):
            if kind in latest:
                distances[i - latest[kind]] += 1
            latest[kind] = i
        return [length for length, _ in distances.most_common(_PERIODS)]

    def longest_row(self, length: int) -> _BlockRow | None:
        """The longest row of blocks of this length, None if it has too few of them."""
        best, begin = (0, 0), 0
        roles: list[tuple[_OperandRole, ...] | None] = []
        for i in range(len(self.nodes) - length):
            roles.append(self._roles(i, length))
            if roles[i] is None:
                begin = i + 1
            elif i - length >= begin and roles[i] != roles[i - length]:
                begin = i - length + 1
            best = max(best, (i + 1 - begin, -begin))
        row = _BlockRow(self, -best[1], length, best[0] // length + 1)
        return row if row.count >= _FEWEST else None

    def _roles(self, i: int, length: int) -> tuple[_OperandRole, ...] | None:
        """The roles of the operands of a call, None if the call `length` calls later is not like it."""
        if self.kinds[i] != self.kinds[i + length]:
            return None
        pairs = zip(self.operands[i], self.operands[i + length], strict=True)
        roles = tuple(self._role(*pair, length) for pair in pairs)
        return None if None in roles else roles  # type: ignore[return-value]

    def _role(self, one: fx.Node, other: fx.Node, length: int) -> _OperandRole | None:
        if one is other:
            return _OperandRole.SHARED
        if one in self.place and other in self.place:
            is_moved = self.place[one] + length == self.place[other]
            return _OperandRole.MOVED if is_moved else None
        is_own = one.op == other.op == "placeholder" and is_like(one, other)
        return _OperandRole.OWN if is_own else None


@dataclass(frozen=True)
class _BlockRow:
    """Calls that repeat.

    Attributes:
        calls: the calls of the graph.
        begin: place of the first call of the first block.
        length: number of calls of a block.
        count: number of blocks.
    """

    calls: _CallKinds
    begin: int
    length: int
    count: int

    @property
    def saved(self) -> int:
        """Number of calls in the blocks between the first and the last one."""
        return (self.count - 2) * self.length

    @cached_property
    def _blocks(self) -> list[Sequence[fx.Node]]:
        begins = range(self.begin, self.begin + self.count * self.length, self.length)
        return [self.calls.nodes[begin : begin + self.length] for begin in begins]

    def blocks(self) -> AlikeBlocks | None:
        """The blocks; None if one reads more than its previous block, or anything else reads one."""
        given = [self._given(number) for number in range(self.count)]
        if not self._read_by_next() or None in given:
            return None
        return AlikeBlocks(self._blocks, given)  # type: ignore[arg-type]

    def _read_by_next(self) -> bool:
        """Whether results of every block but the last are read in this block and the next one alone."""
        return all(
            self._number(user) in (number, number + 1)
            for number, block in enumerate(self._blocks[:-1])
            for node in block
            for user in node.users
        )

    def _number(self, node: fx.Node) -> int:
        """The index of a node's block, -1 for a node outside of the blocks."""
        place = self.calls.place.get(node, -1) - self.begin
        return place // self.length if 0 <= place < self.count * self.length else -1

    def _given(self, number: int) -> dict[fx.Node, fx.Node] | None:
        """Placeholders by those of the first block; None where one corresponds to two."""
        found: dict[fx.Node, fx.Node] = {}
        for i in range(self.begin, self.begin + self.length):
            pairs = zip(self.calls.operands[i], self.calls.operands[i + number * self.length], strict=True)
            for one, other in pairs:
                if one.op == "placeholder" and found.setdefault(one, other) is not other:
                    return None
        return found


def _described(node: fx.Node) -> tuple[Hashable, list[fx.Node]]:
    """A key that is equal for calls that are alike (None for a call that cannot be compared), and its operands."""
    if not writes_nothing(node.target):
        return None, []
    try:
        (arguments, operands), kind = arguments_of(node), kind_of(node)
        hash((arguments, kind))
    except TypeError:
        return None, []
    return (node.target, arguments, kind), operands
