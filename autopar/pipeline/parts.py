"""The parts of a model that stages consist of: its blocks, and what a cut inside of a block leaves of one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import SearchError
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Recompute, blocks_again
from autopar.pipeline.repetition import Repetition


def block_starts(graph: Graph) -> tuple[str, ...]:
    """Names of the ops at which a stage may begin when cuts are searched, that of the first one included.

    They are those of the whole model, also where a captured layer stands for several.
    """
    repetition = Repetition.of(graph)
    turns: dict[int, int] = {}
    starts = []
    for block in repetition.captured:
        copy = turns[block] = turns.get(block, -1) + 1
        starts.append(_name(graph, repetition.blocks[block].start, copy))
    return tuple(starts)


def _name(graph: Graph, op: str, copy: int) -> str:
    """The name in the whole model of one copy of an op."""
    names = graph.copies.get(op, (op,))
    if copy >= len(names):
        raise SearchError(
            f"The graph has few of its layers, and nothing tells the names of the others (of {op}); "
            "capture the model with all its layers."
        )
    return names[copy]


@dataclass(frozen=True)
class Part:
    """A block, or what the beginning of a stage inside of it leaves of one.

    Attributes:
        start: name of the op that it begins with.
        block: number of the block.
        may_repeat: whether it may run again in backward: layers may, and where there are none all blocks.
        captured: number of the part of the captured graph that has its ops.
    """

    start: str
    block: int
    may_repeat: bool
    captured: int


def find_parts(graph: Graph, starts: Iterable[str]) -> tuple[Part, ...]:
    """The parts that begin with these ops, each in the block where it begins.

    Where a captured layer stands for several, these are the parts of the whole model, and they are its blocks:
    raises SearchError for other starts.
    """
    repetition = Repetition.of(graph)
    if repetition.groups:
        return _repeated_parts(graph, repetition, tuple(starts))
    places = {op.name: i for i, op in enumerate(graph.ops)}
    blocks = repetition.blocks
    begins = [places[block.start] for block in blocks]
    has_layers = any(block.repeats for block in blocks)
    found = []
    for number, start in enumerate(sorted(starts, key=places.__getitem__)):
        block = max(0, bisect.bisect_right(begins, places[start]) - 1)
        found.append(Part(start, block, blocks[block].repeats or not has_layers, number))
    return tuple(found)


def is_whole(graph: Graph) -> bool:
    """Whether a graph has all layers of the model."""
    return all(stack.captured == stack.layers for stack in graph.stacks)


def _repeated_parts(
    graph: Graph, repetition: Repetition, starts: Sequence[str]
) -> tuple[Part, ...]:
    names = block_starts(graph)
    inside = sorted(set(starts) - set(names))
    if inside:
        raise SearchError(
            f"A stage cannot begin with {inside[0]} where only few layers were captured; "
            "cut between layers, or capture the model with all of them."
        )
    return tuple(
        Part(name, number, repetition.blocks[block].repeats, block)
        for number, (name, block) in enumerate(zip(names, repetition.captured, strict=True))
    )


def count_repeating(graph: Graph) -> int:
    """How many blocks of a model may run again in backward, in all its stages together."""
    return sum(part.may_repeat for part in find_parts(graph, block_starts(graph)))


def ends_of_repeats(parts: Sequence[Part], recompute: Recompute) -> list[int]:
    """For every part the end (exclusive) of those that a stage which begins with it recomputes in backward.

    The stage may end earlier. Parts in the range that may not repeat are not recomputed. Two parts of one
    block count as one block.
    """
    most = blocks_again(recompute, len(parts))
    again = [number for number, part in enumerate(parts) if part.may_repeat]
    block = 0  # of the recomputed ones, from 0 on
    blocks = [block]
    for one, other in itertools.pairwise(again):
        block += parts[one].block != parts[other].block
        blocks.append(block)
    found = []
    for begin in range(len(parts)):
        first = bisect.bisect_left(again, begin)
        past = bisect.bisect_left(blocks, blocks[first] + most) if first < len(again) else first
        found.append(again[past - 1] + 1 if past > first else begin)
    return found


def repeating_parts(graph: Graph, plan: Plan) -> tuple[tuple[Part, ...], frozenset[int]]:
    """The blocks of a plan, those that it cuts in parts, and the numbers of those that run again."""
    cuts = plan.pipeline.cuts if plan.pipeline else ()
    parts = find_parts(graph, {*block_starts(graph), *cuts})
    edges = [0, *(i for i, part in enumerate(parts) if part.start in cuts), len(parts)]
    ends = ends_of_repeats(parts, plan.recompute)
    again = (
        i
        for begin, end in itertools.pairwise(edges)
        for i in range(begin, min(end, ends[begin]))
        if parts[i].may_repeat
    )
    return parts, frozenset(again)


def parts_of_ops(graph: Graph, plan: Plan) -> dict[str, int]:
    """Name of every op -> number of its block, or of the part of it that a stage of the plan has."""
    return _numbers(graph, repeating_parts(graph, plan)[0])


def blocks_of_ops(graph: Graph) -> dict[str, int]:
    """Name of every op -> number of its block. Raises SearchError as `find_blocks` does."""
    return _numbers(graph, find_parts(graph, block_starts(graph)))


def _numbers(graph: Graph, parts: Sequence[Part]) -> dict[str, int]:
    begins = {part.start: number for number, part in enumerate(parts)}
    found, number = {}, 0
    for op in graph.ops:
        number = found[op.name] = begins.get(op.name, number)
    return found


def ops_again(graph: Graph, plan: Plan) -> frozenset[str]:
    """Names of the ops of the blocks that a plan recomputes in backward."""
    _, again = repeating_parts(graph, plan)
    return frozenset(name for name, number in parts_of_ops(graph, plan).items() if number in again)
