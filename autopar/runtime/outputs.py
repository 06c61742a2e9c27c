"""Outputs of a forward as DTensors, and DTensors as inputs of one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.ir import WHOLE, Layout, R
from autopar.program.program import TensorSpec
from autopar.runtime.hops import route
from autopar.runtime.parameters import placements
from autopar.runtime.transfer import travel
from autopar.runtime.world import World


def as_dtensor(x: Tensor, spec: TensorSpec, world: World) -> Tensor:
    """A local output as a DTensor; a single rank returns it as it is.

    DTensor cannot express splits of minor factors, so along such axes the output is first gathered.
    """
    if world.device_mesh is None:
        return x
    target = _nameable(spec.layout)
    x = travel(x, route(spec.dims, spec.layout, target, world.mesh), world)
    return DTensor.from_local(
        x, world.device_mesh, placements(target, world.mesh), run_check=False,
        shape=torch.Size(spec.shape), stride=torch.empty(spec.shape, device="meta").stride(),
    )  # fmt: skip


def local_part(x: DTensor, spec: TensorSpec, world: World) -> Tensor:
    """This rank's part of an input that came as a DTensor on the same mesh, in the layout that the program takes.

    Nothing is communicated if the DTensor already has this layout.
    """
    target = _nameable(spec.layout)
    local = x.redistribute(placements=placements(target, world.mesh)).to_local().detach()
    return travel(local, route(spec.dims, target, spec.layout, world.mesh), world)


def _nameable(layout: Layout) -> Layout:
    return tuple(s if s.kind == "S" and s.factor in (0, WHOLE) else R for s in layout)
