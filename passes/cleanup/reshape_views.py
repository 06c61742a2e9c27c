"""view(x, [8, -1]), _unsafe_view(x, [8, -1]), reshape(x, [8, -1]) -> reshape(x, [8, 6]).

Local tensors may have strides that `view` rejects (as in T5 and Swin). Whether export says -1 or the size depends on
strides, and these on the device: attention's result has other ones on the meta device.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops.nodes import bound_arguments

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def reshape_views(module: fx.GraphModule) -> None:
    """Replaces views, and writes out sizes that are known."""
    for node in module.graph.nodes:
        if node.target in _VIEWS:
            node.target = aten.reshape.default
            tensor, asked = bound_arguments(node).values()
            sizes = zip(asked, node.meta["val"].shape, strict=True)
            node.args, node.kwargs = (tensor, [_known(*each) for each in sizes]), {}
    module.recompile()


def _known(asked: object, size: object) -> object:
    """The size for -1, unless it is open."""
    return size if isinstance(size, int) and asked == -1 else asked
