"""Where a model may be cut into pipeline stages: between its blocks.

A block is one of the repeated layers, with the ops between it and the next layer (such as a residual sum in the
parent's forward). The ops before, between or after lists of layers (embedding, final norm, head and loss) are blocks,
too. In a model without repeated layers, the blocks are the modules of the outermost level with several modules. Every
block uses a parameter. Ops that depend on no parameter (masks, positions) begin no block; every stage that needs
their results computes them by itself.

    embed  layers.0  layers.1  ...  layers.n  norm head loss
    |      |         |              |         |                  blocks begin here

Encoders with decoders, layers that alternate between two lists, and U-shaped models are lists of blocks, too. A
tensor may be used several blocks later; the modules that price and run stages send it through the stages between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import SearchError
from autopar.ir import Graph, Op


@dataclass(frozen=True)
class Block:
    """A part of a model that the search never cuts.

    Attributes:
        start: name of its first op.
        module: path of the layer, or of the first module of the block; "" for the model itself.
        repeats: whether the block is a repeated layer, which backward may recompute.
    """

    start: str
    module: str
    repeats: bool


def find_blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a graph in order; the first one begins with the first op.

    Layers that are not in the graph have no blocks here, see `autopar.pipeline.repetition`.
    """
    dependent = _dependent(graph)
    found = list(_layer_blocks(graph, dependent) if graph.stacks else _module_blocks(dependent))
    blocks = _with_parameters(graph, found)
    first = graph.ops[0].name
    return (Block(first, blocks[0].module, blocks[0].repeats), *blocks[1:])


def has_blocks(graph: Graph) -> bool:
    """Whether a graph has blocks, which is so if its ops use parameters."""
    return bool(_dependent(graph))


def _dependent(graph: Graph) -> list[Op]:
    """The ops that depend on a parameter."""
    known = set(graph.parameters.values())
    found = []
    for op in graph.ops:
        if any(name in known for name in op.operands):
            known.update(op.results)
            found.append(op)
    return found


def _layer_blocks(graph: Graph, ops: list[Op]) -> Iterator[Block]:
    """A block per layer, and one for what comes first and what follows the last layer of a stack."""
    latest: tuple[str, int] | None = None  # the layer that ran last
    places = [graph.stack_of(op.module) for op in ops]
    ends = {place[0].path: i for i, place in enumerate(places) if place}
    outside = True
    for position, (op, place) in enumerate(zip(ops, places, strict=True)):
        if place is None:
            after_last = latest is not None and position > ends[latest[0]]
            if position == 0 or (not outside and after_last):
                run = itertools.takewhile(lambda i: places[i] is None, range(position, len(ops)))
                start = ops[_narrowest(graph, ops, list(run))] if position else op
                yield Block(start.name, start.module, False)
                outside = True
        elif (place[0].path, place[1]) != latest or (outside and latest is not None):
            latest, outside = (place[0].path, place[1]), False
            yield Block(op.name, f"{latest[0]}.{latest[1]}", True)


def _narrowest(graph: Graph, ops: list[Op], run: list[int]) -> int:
    """The op in a run of ops outside of layers before which the fewest bytes pass, up to the first op with a parameter.

    A block begins there, so that the residual sum after the last layer belongs to the layer.
    """
    parameters = set(graph.parameters.values())
    first = next((i for i in run if parameters.intersection(ops[i].operands)), run[0])
    made = {name: i for i, op in enumerate(ops) for name in op.results}
    last = {name: i for i, op in enumerate(ops) for name in op.operands}

    def crossing_bytes(at: int) -> int:
        crossing = (graph.tensors[n] for n, i in made.items() if i < at <= last.get(n, -1))
        return sum(math.prod(tensor.shape) * tensor.itemsize_bytes for tensor in crossing)

    return min(range(run[0], first + 1), key=crossing_bytes)


def _module_blocks(ops: list[Op]) -> Iterator[Block]:
    """A block for each run of ops of one module, at the outermost level with several modules; else one per op."""
    depth, deepest = 1, max((len(_path(op)) for op in ops), default=0)
    while depth < deepest and len({_path(op)[:depth] for op in ops if op.module}) < 2:
        depth += 1
    latest: tuple[str, ...] | None = None
    for position, op in enumerate(ops):
        path = _path(op)[:depth]
        if position == 0 or (op.module and path != latest):
            latest = path
            yield Block(op.name, ".".join(path), False)


def _path(op: Op) -> tuple[str, ...]:
    return tuple(op.module.split(".")) if op.module else ()


def _with_parameters(graph: Graph, blocks: list[Block]) -> list[Block]:
    """The blocks, after joining each block without a parameter to the one before it (the first, to the one after)."""
    begins = {block.start for block in blocks}
    parameters = set(graph.parameters.values())
    using: set[str] = set()
    current = blocks[0].start if blocks else ""
    for op in graph.ops:
        current = op.name if op.name in begins else current
        if parameters.intersection(op.operands):
            using.add(current)
    kept = [block for block in blocks if block.start in using]
    if not kept:
        raise SearchError("The model has no parameters, but a pipeline stage needs some.")
    return kept
