"""The blocks of a whole model, given a graph with only three layers of each list of repeated layers.

    captured    embed  layers.0  layers.1               layers.2   head
    whole       embed  layers.0  layers.1 ... layers.30 layers.31  head
                                 `---- copies of layers.1 ----'

The captured blocks are priced, and their prices are repeated for the copies. Tensors between blocks are repeated, too:
if the middle layer computes a tensor and the last layer uses it, then in the whole model every copy computes such a
tensor, and the next copy uses it. A tensor that all layers use (a mask, the result of an encoder) is one tensor
that every copy uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autopar.ir import Graph, Stack
from autopar.pipeline.blocks import Block, find_blocks

Places = Mapping[int, tuple[int, ...]]  # captured block -> blocks of the whole model


class Group(NamedTuple):
    """The captured blocks `begin` to `end` - 1, of which the whole model has `times` copies."""

    begin: int
    end: int
    times: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self.begin <= block < self.end


@dataclass(frozen=True)
class Repetition:
    """The blocks of the whole model for which each captured block stands.

    Attributes:
        blocks: captured blocks, in the graph's order.
        groups: runs of captured blocks that stand for several blocks, in order.
        captured: for every block of the whole model, the index of its captured block, in order.
        stacks: lists of layers of which the graph has fewer than the model.
    """

    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    captured: tuple[int, ...]
    stacks: tuple[Stack, ...] = ()
    _spreads: dict[object, tuple[Places, ...]] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def of(cls, graph: Graph) -> Repetition:
        """Finds which captured blocks stand for several layers; none do in a graph with all layers of the model."""
        blocks = find_blocks(graph)
        groups = tuple(_groups(graph, blocks))
        captured: list[int] = []
        begin = 0
        for group in groups:
            captured += range(begin, group.begin)
            captured += [*range(group.begin, group.end)] * group.times
            begin = group.end
        captured += range(begin, len(blocks))
        short = tuple(s for s in graph.stacks if s.captured < s.layers)
        return cls(blocks, groups, tuple(captured), short)

    def module(self, place: int) -> str:
        """Path of the module of a block of the whole model, such as `layers.37`."""
        block = self.captured[place]
        found, group = self.blocks[block].module, self.group_of(block)
        return self.layer(found, (place - self.at(block)) // group.length if group else 0)

    def layer(self, path: str, copy: int) -> str:
        """The path in the whole model of a captured layer, or of one that it stands for."""
        stack = next((s for s in self.stacks if s.index(path) is not None), None)
        if stack is None:
            return path
        number = stack.index(path)
        assert number is not None, "the stack has the path"
        if number > stack.middle and number < stack.captured:
            number += stack.layers - stack.captured
        return f"{stack.path}.{number + copy}"

    def group_of(self, block: int) -> Group | None:
        """The run of repeated blocks (`Group`) that has a captured block; None for a block that is not repeated."""
        return self._places[block][1]

    def at(self, block: int, copy: int = 0) -> int:
        """The place of a captured block's copy in the whole model."""
        place, group = self._places[block]
        return place + (copy * group.length if group else 0)

    @cached_property
    def _places(self) -> tuple[tuple[int, Group | None], ...]:
        """The place of every captured block's first copy, and the group that the block belongs to."""
        return tuple(
            (
                block + sum((g.times - 1) * g.length for g in self.groups if g.end <= block),
                next((group for group in self.groups if block in group), None),
            )
            for block in range(len(self.blocks))
        )

    def all_of(self, block: int) -> tuple[int, ...]:
        """The places of all copies of a captured block."""
        group = self.group_of(block)
        return tuple(self.at(block, copy) for copy in range(group.times if group else 1))

    def spread(self, made: int | None, owner: int | None, blocks: Collection[int]) -> tuple[Places, ...]:
        """Where each tensor of the whole model that a captured tensor stands for is made and used.

        Args:
            made: captured block that makes the tensor; None for a parameter, a buffer or an input.
            owner: captured block of the layer that a parameter belongs to; None outside of repeated layers.
            blocks: all captured blocks that make or use the tensor.

        Returns:
            One entry for each tensor of the whole model: captured block -> positions of its blocks in the
            whole model. Equal arguments give the same object: a model has many more tensors than ways to use them.
        """
        key = (made, owner, tuple(blocks))
        if key not in self._spreads:
            self._spreads[key] = tuple(self._spread(made, owner, blocks))
        return self._spreads[key]

    def _spread(self, made: int | None, owner: int | None, blocks: Collection[int]) -> Iterator[Places]:
        source = made if made is not None else owner
        group = self.group_of(source) if source is not None else None
        if group is None:
            yield {block: self._shared(block, made, blocks) for block in blocks}
            return
        for copy in range(group.times):
            yield {b: (at,) for b in blocks if (at := self._seen(b, group, copy)) is not None}

    def _seen(self, block: int, group: Group, copy: int) -> int | None:
        """The block of the whole model that computes or uses one copy of a tensor of a group; None if there is none."""
        if block in group:
            return self.at(block, copy)
        if block < group.begin or copy == group.times - 1:
            return self.at(block)
        follower = block - group.length  # the next copy reads what the last layer reads
        return self.at(follower, copy + 1) if follower in group else None

    def _shared(self, block: int, made: int | None, blocks: Collection[int]) -> tuple[int, ...]:
        """The copies of a captured block that use a tensor computed outside of its group."""
        group = self.group_of(block)
        if group is None or made is None:
            return self.all_of(block)
        layer_before = group.begin - group.length <= made < group.begin
        last_too = any(group.end <= other < group.end + group.length for other in blocks)
        return (self.at(block),) if layer_before and not last_too else self.all_of(block)


def _groups(graph: Graph, blocks: Sequence[Block]) -> list[Group]:
    found = []
    places = [graph.stack_of(block.module) for block in blocks]
    for stack in graph.stacks:
        if stack.captured < stack.layers:
            begin = places.index((stack, stack.middle))
            end = next(i for i, place in enumerate(places) if place and place[0] == stack and place[1] > stack.middle)
            found.append(Group(begin, end, stack.layers - stack.captured + 1))
    return sorted(found)
