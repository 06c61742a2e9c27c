"""A loss in tiles: when it is tried, and the capture that has it.

The logits of a loss are the largest tensor of a model with a long sequence or a large vocabulary. In tiles they take
little memory, and one more product of the head (`autopar.rules.linear_loss`). So a plan in tiles is searched where no
other fits, and where one that fits recomputes layers, or keeps parameters on the host, beside logits that take
more than two of the largest tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from autopar.capture.captured import Captured
from autopar.errors import AutoparError, MemoryBoundError, StateError, StepError
from autopar.ir import Graph, Plan, local_shape, operand_layouts
from autopar.ops.nodes import copied
from autopar.passes import join_losses
from autopar.search.request.request import Request

T = TypeVar("T")
# 4,186 rows of the 128,256 classes of Llama 3 in bfloat16: a product of a tile is as fast as a larger one.
LARGEST_TILE_BYTES = 2**30
# Four tensors of a tile's size exist at a time (`autopar.rules.linear_loss`): a sixteenth of the memory.
_TILES_IN_MEMORY = 64
_TRIED_FROM_BYTES = 2 * LARGEST_TILE_BYTES
_LOSS = "aten.cross_entropy_loss"


def tile_bytes_of(request: Request) -> int:
    """Bytes of the tiles that are tried: a power of two, so that a little more memory gives the same tiles."""
    free_bytes = request.bound_bytes - request.hardware.reserved_bytes
    wanted = max(1, free_bytes // _TILES_IN_MEMORY)
    return min(LARGEST_TILE_BYTES, 2 ** (wanted.bit_length() - 1))


def best_in_tiles(
    find: Callable[[int | None], T],
    tile_bytes: int,
    plan_of: Callable[[T], tuple[Graph, Plan]],
    faster: Callable[[T, T], T],
) -> T:
    """What is found without tiles of the loss, or with tiles where only that fits, or is faster.

    Args:
        find: function from bytes of a tile, or None for a loss without tiles, to what is found; it raises
            MemoryBoundError where no plan fits.
        tile_bytes: bytes of the tiles that are tried.
        plan_of: function from what is found to the captured model and its plan.
        faster: function to the one of two with the shorter step by its price, the first where they are equal.
    """
    found = in_tiles_if_needed(find, tile_bytes)
    graph, plan = plan_of(found)
    if plan.loss_tile_bytes is not None or not _promises(graph, plan):
        return found
    try:
        other = find(tile_bytes)
    except AutoparError:  # of a loss that has no tiles, or of an option that does not go with them
        return found
    return faster(found, other)


def in_tiles_if_needed(find: Callable[[int | None], T], tile_bytes: int) -> T:
    """What is found without tiles of the loss, or with tiles where only that fits; arguments as in `best_in_tiles`."""
    try:
        return find(None)
    except StateError:  # parameters alone take too much
        raise
    except MemoryBoundError as error:
        try:
            return find(tile_bytes)
        except AutoparError:
            raise error from None


def _promises(graph: Graph, plan: Plan) -> bool:
    """Whether memory costs a plan time, and the logits of a loss take more than two of the largest tiles."""
    far = any(how.tier != "device" or how.resident_tier != "device" for how in plan.parameters.values())
    logits = (_logits_bytes(graph, plan, op.name) for op in graph.ops if op.kind == _LOSS)
    return (far or plan.recompute != "none") and max(logits, default=0) > _TRIED_FROM_BYTES


def _logits_bytes(graph: Graph, plan: Plan, name: str) -> int:
    op = graph.by_name[name]
    tensor, layout = graph.tensors[op.operands[0]], operand_layouts(op, plan.ops[name])[0]
    return math.prod(local_shape(tensor.dims, layout, plan.mesh)) * tensor.itemsize_bytes


def in_tiles(captured: Captured, tile_bytes: int | None, *, must: bool = True) -> Captured:
    """A cleaned capture whose losses run in tiles, see `autopar.passes.join_losses`; itself for None.

    Raises StepError for a step none of whose losses can; without `must` the capture stays as it is then.
    """
    if tile_bytes is None:
        return captured
    module = copied(captured.module)
    if not join_losses(module, tile_bytes):
        if not must:
            return captured
        raise StepError(
            "No loss of the step can be computed in tiles: none is a cross-entropy of the logits of a linear layer, of "
            "shape [rows, classes], with targets that are class indices, whose logits nothing else uses."
        )
    return replace(captured, module=module, loss_tile_bytes=tile_bytes)
