"""What stays for backward where blocks of the model are run again in it (Chen et al. 2016).

Of a block that is run again only what it takes from outside stays: the residual stream, and tables or
masks made before, which all blocks share. While one block is run again, all that it keeps comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost_model.memory import SavedTensors, keeps
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Layout, Op, Plan, operand_layouts, result_layouts

Memory = tuple[str, Layout]  # of a tensor in a layout


def recomputed_saved(graph: Graph, plan: Plan, blocks: Sequence[str]) -> dict[Memory, Op]:
    """The memory that stays, with the first op that keeps it.

    Args:
        graph: the captured model.
        plan: gives the layouts.
        blocks: module paths such as `layers.0`, each of which is run again; () for none.
    """
    saved = SavedTensors(graph)
    stored = {*graph.parameters.values(), *graph.buffers.values()}
    block_of = {op.name: _block(op.module, blocks) for op in graph.ops}
    found: dict[Memory, Op] = {}
    for op in graph.ops:
        kept = _kept(op, graph, block_of)
        labels = plan.ops[op.name]
        layouts = (*operand_layouts(op, labels), *result_layouts(op, labels))
        for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
            if name in kept and saved.root(name) not in stored:
                found.setdefault(saved.memory(name, layout), op)
    return found


def recomputed_bytes(graph: Graph, plan: Plan, blocks: Sequence[str]) -> int:
    """Bytes of the memory that stays; without what one block keeps while it is run again."""
    sizes = Sizes(plan.mesh)
    return sum(
        graph.stands_for.get(name, 1) * sizes.bytes(graph.tensors[name], layout)
        for name, layout in recomputed_saved(graph, plan, blocks)
    )


def _kept(op: Op, graph: Graph, block_of: Mapping[str, str | None]) -> tuple[str, ...]:
    """Of an op outside of all blocks what it saves; of one in a block what comes from outside."""
    block = block_of[op.name]
    if block is None:
        return op.saved if keeps(op, graph.tensors) else ()
    makers = {name: graph.producer.get(name) for name in op.operands}
    return tuple(
        name for name, maker in makers.items() if maker is None or block_of[maker.name] != block
    )


def _block(module: str, blocks: Sequence[str]) -> str | None:
    return next((b for b in blocks if module == b or module.startswith(f"{b}.")), None)
