"""Binds a program to a rank, a device and process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.share import size_on
from autopar.ops.alone import alone
from autopar.ops.collectives import Collective
from autopar.ops.ring import Ring


def arguments_on(node: fx.Node, rank: int) -> Any:
    """The arguments of a call, and those by keyword, with the sizes of one rank."""
    return fx.node.map_aggregate((node.args, node.kwargs), lambda x: size_on(x, rank))


def bind_sizes(module: fx.GraphModule, rank: int) -> None:
    """reshape(x, [Share(11, 11, 10), 64]) -> reshape(x, [10, 64]): the sizes of one rank."""
    for node in module.graph.nodes:
        node.args, node.kwargs = arguments_on(node, rank)
        if left := alone(node):
            node.meta["alone"] = left.on(rank)
    module.recompile()


def retarget_device(module: fx.GraphModule, device: torch.device) -> None:
    """f(..., device=captured) -> f(..., device=device): factories would use the device of the capture."""
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    module.recompile()


def bind_groups(module: fx.GraphModule, groups: Mapping[str, str]) -> None:
    """autopar::op(..., axis, ...) -> autopar::op(..., c10d group of that axis, ...)."""
    for node in module.graph.nodes:
        if call := Collective.of(node):
            node.args = call._replace(group=groups[call.group]).args
        elif ring := Ring.of(node):
            node.args = ring.bound(groups).args
    module.recompile()
