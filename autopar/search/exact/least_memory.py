"""A lower bound on the memory of a rank, whatever a plan recomputes.

Recomputation never frees two kinds of saved tensors: those that an op outside of the repeated blocks saves (the head,
the loss), and those that enter a repeated block and are saved there. A block that is recomputed needs the latter to
begin with, and an op that is not recomputed saves them itself. Where activations may be stored on the host, they can
leave the device all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.cost_model import keeps
from autopar.ir import UNSPLIT, Graph, Op
from autopar.pipeline.blocks import find_blocks
from autopar.search.exact.problem import Problem


def least_bytes(problem: Problem, *, may_offload: bool) -> float:
    """A lower bound on the peak memory of a rank under any plan for one pipeline rank, in bytes.

    Args:
        problem: the search's data for one mesh, without owners of ops.
        may_offload: whether tensors that enter a block may be stored on the host.
    """
    graph = problem.graph
    stored = {*graph.parameters.values(), *graph.buffers.values()}
    kept: dict[str, list[str]] = {}  # tensor -> the views of its memory that ops save
    for name in _always_saved(graph, may_offload):
        kept.setdefault(problem.saved.root(name), []).append(name)
    saved = sum(graph.layer_count.get(root, 1) * problem.least_saved_bytes(kept[root]) for root in kept.keys() - stored)
    whole = (UNSPLIT,) * len(problem.mesh.axes)
    working = (problem.prices.working_bytes(index, whole) for index in range(len(problem.ops)))
    ranks = math.prod(problem.mesh.sizes)
    return problem.least_state_bytes + (saved + max(working, default=0.0)) / ranks


def _always_saved(graph: Graph, may_offload: bool) -> Iterator[str]:
    """Names of tensors that some op saves under every recomputation."""
    block_of = _blocks(graph)
    for op in graph.ops:
        if not keeps(op, graph.tensors):
            continue
        if block_of[op.name] is None:
            yield from op.saved
        elif not may_offload:
            yield from (name for name in op.saved if _enters(name, op, graph, block_of))


def _enters(name: str, op: Op, graph: Graph, block_of: dict[str, int | None]) -> bool:
    """Whether a saved tensor is an operand that no op of the same block computes."""
    made = graph.producer.get(name)
    return name in op.operands and (made is None or block_of[made.name] != block_of[op.name])


def _blocks(graph: Graph) -> dict[str, int | None]:
    """Op name -> index of its block; None for a block that backward never recomputes."""
    blocks = find_blocks(graph)
    begins = {block.start: number for number, block in enumerate(blocks)}
    has_layers = any(block.repeats for block in blocks)
    found: dict[str, int | None] = {}
    number = 0
    for op in graph.ops:
        number = begins.get(op.name, number)
        found[op.name] = number if blocks[number].repeats or not has_layers else None
    return found
