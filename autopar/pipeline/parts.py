"""The parts of which pipeline stages consist: blocks, and pieces of a block that a stage boundary cuts."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import SearchError
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Recompute, recomputed_blocks
from autopar.pipeline.repetition import Repetition


def block_starts(graph: Graph) -> tuple[str, ...]:
    """Name of the first op of every block: the ops with which the stages of a searched plan may begin.

    These are the blocks of the whole model, even if a captured layer stands for several.
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
            f"The graph has only a few of its layers, and the names of the others are not known (of {op}); capture the "
            "model with all its layers."
        )
    return names[copy]


@dataclass(frozen=True)
class Part:
    """A block, or a piece of one if a stage begins inside of it.

    Attributes:
        start: name of the first op.
        block: index of the block.
        may_repeat: whether backward may recompute it: True for repeated layers, and for all blocks of a model without
            them.
        captured: number of the part of the captured graph that has its ops.
    """

    start: str
    block: int
    may_repeat: bool
    captured: int


def find_parts(graph: Graph, starts: Iterable[str]) -> tuple[Part, ...]:
    """The parts of the whole model that begin with these ops.

    If a captured layer stands for several, a part can only be a whole block: other starts raise SearchError.
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


def _repeated_parts(graph: Graph, repetition: Repetition, starts: Sequence[str]) -> tuple[Part, ...]:
    names = block_starts(graph)
    inside = sorted(set(starts) - set(names))
    if inside:
        raise SearchError(
            f"A stage cannot begin with {inside[0]} where only a few layers were captured; cut between layers, or "
            "capture the model with all of them."
        )
    return tuple(
        Part(name, number, repetition.blocks[block].repeats, block)
        for number, (name, block) in enumerate(zip(names, repetition.captured, strict=True))
    )


def count_repeating(graph: Graph) -> int:
    """Number of blocks of a model that backward may recompute."""
    return sum(part.may_repeat for part in find_parts(graph, block_starts(graph)))


def ends_of_repeats(parts: Sequence[Part], recompute: Recompute) -> list[int]:
    """For every part, the end (exclusive) of the parts that are recomputed in a stage beginning with this part.

    The stage itself may end earlier. Parts without `may_repeat` are never recomputed. Two parts of one block count as
    one block.
    """
    most = recomputed_blocks(recompute, len(parts))
    again = [number for number, part in enumerate(parts) if part.may_repeat]
    block = 0  # counts the blocks that may be recomputed, from 0 on
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
    """The parts of a plan's stages, and the indices of the parts that backward recomputes."""
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
    """Op name -> number of its part, in the stages of the plan."""
    return _numbers(graph, repeating_parts(graph, plan)[0])


def blocks_of_ops(graph: Graph) -> dict[str, int]:
    """Op name -> index of its block."""
    return _numbers(graph, find_parts(graph, block_starts(graph)))


def _numbers(graph: Graph, parts: Sequence[Part]) -> dict[str, int]:
    begins = {part.start: number for number, part in enumerate(parts)}
    found, number = {}, 0
    for op in graph.ops:
        number = found[op.name] = begins.get(op.name, number)
    return found


def ops_recomputed_by(graph: Graph, plan: Plan) -> frozenset[str]:
    """Names of the ops of the blocks that a plan recomputes in backward."""
    _, again = repeating_parts(graph, plan)
    return frozenset(name for name, number in parts_of_ops(graph, plan).items() if number in again)
