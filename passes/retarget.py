"""Binds a program to a device and to process groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.ops.collectives import Collective
from autopar.ops.ring import Ring


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
