"""linear, rows of it picked or regrouped, cross-entropy -> one call, which a plan can run in tiles of rows.

    y = linear(x, w, b); z = reshape(to(y, float32), [n, c]); l = cross_entropy_loss(z, t)
                                    ->   r = reshape(x, [n, d]); l = linear_cross_entropy(r, w, b, t, ..., tile_bytes)

Tiles are added up, so that logits of 16 bits go to the loss in float32, and the loss back to its format.
What stands between the layer and the loss may pick and regroup rows, and change the format of the logits once; all of
it has no other use. So logits that the model returns too, or that another term of the loss reads, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.ops import linear_loss
from autopar.ops.attention_block import wide
from autopar.ops.nodes import bound_arguments, call_like
from autopar.passes.cleanup.name_nodes import name_nodes

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.to.dtype)
_COPIES = (aten.clone.default, aten.contiguous.default)
_VIEWS = (aten.reshape.default, aten.view.default)


def join_losses(module: fx.GraphModule, tile_bytes: int) -> int:
    """Joins every loss of a linear layer, in place, and returns how many there were.

    Args:
        module: a cleaned graph.
        tile_bytes: bytes that the logits of a tile may take on a rank.
    """
    losses = module.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    joined = sum(_join(module.graph, loss, tile_bytes) for loss in losses)
    module.graph.eliminate_dead_code()
    name_nodes(module)
    return joined


def _join(graph: fx.Graph, loss: fx.Node, tile_bytes: int) -> bool:
    given = bound_arguments(loss)
    logits, target = given["self"], given["target"]
    if logits.meta["val"].ndim != 2 or target.meta["val"].is_floating_point():
        return False
    found = _chain(logits)
    if found is None:
        return False
    layer, between = found
    operands, dtype = bound_arguments(layer), loss.meta["val"].dtype
    with graph.inserting_before(loss):
        x = operands["input"]
        for node in between:
            x = _of_rows(graph, node, x)
        joined = call_like(
            graph,
            loss,
            _torch.autopar_op(linear_loss.NAME),
            *(x, operands["weight"], operands["bias"], target, given["weight"], given["reduction"]),
            *(given["ignore_index"], given["label_smoothing"], wide(logits.meta["val"].dtype), tile_bytes),
        )
        if joined.meta["val"].dtype != dtype:
            joined = call_like(graph, loss, aten._to_copy.default, joined, dtype=dtype)
    loss.replace_all_uses_with(joined)
    graph.erase_node(loss)
    return True


def _chain(logits: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The linear layer that makes the logits, and the calls on rows between; None where there is another op."""
    between: list[fx.Node] = []
    node, casts = logits, 0
    while node.target is not aten.linear.default:
        casts += node.target in _CASTS
        if len(node.users) != 1 or casts > 1 or not _is_of_rows(node):
            return None
        if node.target not in (*_CASTS, *_COPIES):
            between.insert(0, node)
        node = node.all_input_nodes[0]
    has_matrix = bound_arguments(node)["weight"].meta["val"].ndim == 2
    return (node, between) if len(node.users) == 1 and has_matrix else None


def _is_of_rows(node: fx.Node) -> bool:
    """Whether a call picks or regroups rows, each of which stays as it is."""
    if node.target in (*_CASTS, *_COPIES):
        return True
    source = node.all_input_nodes[0].meta["val"] if len(node.all_input_nodes) == 1 else None
    if source is None or not isinstance(node.meta["val"], torch.Tensor):
        return False
    if node.target in _VIEWS:
        return bool(node.meta["val"].shape[-1] == source.shape[-1])
    return node.target is aten.slice.Tensor and bound_arguments(node)["dim"] % source.ndim < source.ndim - 1


def _of_rows(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """The same call on the rows of `x`."""
    rest: list[Any] = list(node.args[1:])
    if node.target in _VIEWS:
        rest[0] = [*rest[0][:-1], x.meta["val"].shape[-1]]
    return call_like(graph, node, node.target, x, *rest, **node.kwargs)
