"""mse_loss(x, y, mean) -> mean(mse_loss(x, y, none)), and so for the losses of one element or row at a time.

broadcast_tensors(x, y)[i], which such losses begin with, -> that tensor, expanded where it must be.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.nodes import bound_arguments, call_like, schema
from autopar.rules.loss import MEAN, REDUCED, SUM

aten = torch.ops.aten
_NONE = 0
_REDUCTIONS = {MEAN: aten.mean.default, SUM: aten.sum.default}


def unreduce_losses(module: fx.GraphModule) -> None:
    """Replaces a loss by the loss without reduction and a reduction, so that each of them has a rule for splitting."""
    for node in list(module.graph.nodes):
        if node.target is aten.broadcast_tensors.default:
            _expand_each(module.graph, node)
        elif str(getattr(node.target, "overloadpacket", "")) in REDUCED:
            _unreduce(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()


def _unreduce(graph: fx.Graph, node: fx.Node) -> None:
    reduction = bound_arguments(node)["reduction"]
    if reduction not in _REDUCTIONS:
        return
    arguments = {**bound_arguments(node), "reduction": _NONE}
    wanted = schema(node).arguments
    args = [arguments[a.name] for a in wanted if not a.kwarg_only]
    kwargs = {a.name: arguments[a.name] for a in wanted if a.kwarg_only}
    with graph.inserting_before(node):
        each = call_like(graph, node, node.target, *args, **kwargs)
        total = call_like(graph, node, _REDUCTIONS[reduction], each)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _expand_each(graph: fx.Graph, node: fx.Node) -> None:
    for item in list(node.users):
        source = node.args[0][item.args[1]]  # type: ignore[index]
        shape = item.meta["val"].shape
        if source.meta["val"].shape != shape:  # type: ignore[union-attr]
            with graph.inserting_before(item):
                source = call_like(graph, item, aten.expand.default, source, list(shape))
        item.replace_all_uses_with(source)  # type: ignore[arg-type]
        graph.erase_node(item)
