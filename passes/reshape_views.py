"""view(x, shape), _unsafe_view(x, shape) -> reshape(x, shape)."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def reshape_views(module: fx.GraphModule) -> None:
    """Replaces views, because local tensors may have strides that `view` rejects (as in T5 and Swin)."""
    for node in module.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    module.recompile()
