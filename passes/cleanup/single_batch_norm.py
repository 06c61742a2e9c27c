"""_native_batch_norm_legit_no_training(x, w, b, mean, var, m, eps)[0] -> batch_norm(..., training=False)."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def single_batch_norm(module: fx.GraphModule) -> None:
    """Replaces batch norm in evaluation by an op with one result; the other two results are empty and dropped."""
    for node in module.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        users = list(node.users)
        if any(user.args[1] != 0 for user in users):
            continue
        *tensors, momentum, eps = node.args
        with module.graph.inserting_before(node):
            arguments = (*tensors, False, momentum, eps, False)
            new = module.graph.call_function(aten.batch_norm.default, arguments)
        new.meta = {**node.meta, "val": node.meta["val"][0]}
        for user in users:
            user.replace_all_uses_with(new)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()
