"""Which calls of a program run again in backward where its plan says recompute=full.

They are those of the layers of stacks. A model without stacks has all of its blocks run again, each on
its own: of every one only what enters it is kept. What a block is, `autopar.search.blocks` says, so that
the search prices what runs.
"""

from __future__ import annotations

from torch import fx

from autopar.ir import Graph
from autopar.passes.cut_stages import stage_numbers
from autopar.search.blocks import find_blocks


def mark_blocks(module: fx.GraphModule, graph: Graph) -> frozenset[int]:
    """Writes the number of its block into `meta["block"]` of every call; returns the blocks that run again."""
    blocks = find_blocks(graph)
    places = {op.name: i for i, op in enumerate(graph.ops)}
    begins = [places[block.start] for block in blocks[1:]]
    for node, number in stage_numbers(module, places, begins).items():
        node.meta["block"] = number
    layers = [i for i, block in enumerate(blocks) if block.repeats]
    return frozenset(layers or range(len(blocks)))
