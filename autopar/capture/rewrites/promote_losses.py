"""mse_loss(x, y) of two dtypes -> mse_loss(x.to(dtype), y), for what torch has no backward of."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

# torch 2.11 has no backward of the first, and no torch one of the second.
_LOSSES = (aten.mse_loss.default, aten.huber_loss.default)


def promote_losses(module: fx.GraphModule) -> None:
    """Gives both operands the dtype of the loss, as the forward does by itself."""
    for loss in _LOSSES:
        for node in module.graph.find_nodes(op="call_function", target=loss):
            for x in node.all_input_nodes:
                _cast(x, node)
    module.recompile()


def _cast(x: fx.Node, loss: fx.Node) -> None:
    dtype = loss.meta["val"].dtype
    if x.meta["val"].dtype is not dtype:
        with loss.graph.inserting_before(loss):
            cast = loss.graph.call_function(aten.to.dtype, (x, dtype))
        cast.meta = {**loss.meta, "val": x.meta["val"].to(dtype)}
        loss.replace_input_with(x, cast)
