"""Which block a call of a program belongs to, and which blocks run again in backward.

Those are the first layers of every stage, as many as the plan says. A model without stacks has its blocks
run again instead. Of every one only what enters it is kept. What a block is, and which come first,
`autopar.pipeline.blocks` says, so that the search prices what runs.
"""

from __future__ import annotations

from torch import fx

from autopar.ir import Graph, Plan
from autopar.passes.cut_stages import stage_numbers
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.parts import repeating_parts


def mark_blocks(module: fx.GraphModule, graph: Graph, plan: Plan) -> frozenset[int]:
    """Writes the number of its block into `meta["block"]` of every call; returns the blocks that run again.

    Blocks are numbered as `repeating_parts` has them: one that is cut by the plan counts as two.
    """
    parts, again = repeating_parts(graph, plan) if has_blocks(graph) else ((), frozenset())
    places = {op.name: i for i, op in enumerate(graph.ops)}
    begins = [places[part.start] for part in parts[1:]]
    for node, number in stage_numbers(module, places, begins).items():
        node.meta["block"] = number
    return again
