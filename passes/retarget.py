"""A portable program -> one that runs: on this device, on these process groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.ops.collectives import NAMES
from autopar.rules.spec import bound_arguments


def retarget_device(module: fx.GraphModule, device: torch.device) -> None:
    """f(..., device=captured) -> f(..., device=device): factories ran where the model was captured."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    module.recompile()


def bind_groups(module: fx.GraphModule, groups: Mapping[str, str]) -> None:
    """autopar::op(..., axis, ...) -> autopar::op(..., c10d group of that axis, ...)."""
    for node in module.graph.nodes:
        if is_collective(node):
            x, dims, size, axis, backward = node.args
            node.args = (x, dims, size, groups[axis], backward)
    module.recompile()


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a collective of torch.ops.autopar."""
    ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "autopar"
    return ours and node.target._schema.name.split("::")[1] in NAMES  # type: ignore[union-attr]


def draws(node: fx.Node) -> bool:
    """Whether a node takes numbers from the default generator; attention does with dropout alone."""
    target = node.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded not in target.tags
    ):
        return False
    arguments = bound_arguments(node)
    if arguments.get("train") is False:  # a layer that drops in training alone
        return False
    return bool(arguments.get("dropout_p", arguments.get("dropout", True)))
