"""Outputs of a forward as they are asked for, whole or as DTensors, and DTensors as inputs of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.ir import WHOLE, Layout, R
from autopar.program.program import TensorSpec
from autopar.runtime.hops import route
from autopar.runtime.parameters import placements
from autopar.runtime.settings import Batch, Outputs
from autopar.runtime.transfer import travel
from autopar.runtime.world import World


def as_asked(x: Tensor, spec: TensorSpec, world: World, outputs: Outputs) -> Tensor:
    """A local output as it is, whole on every rank, or as a DTensor."""
    if outputs == "whole":
        return travel(x, route(spec.dims, spec.layout, (R,) * len(spec.layout), world.mesh), world)
    return as_dtensor(x, spec, world) if outputs == "dtensor" else x


def words_of_split(
    outputs: Sequence[Tensor], specs: Sequence[TensorSpec], world: World, batch: Batch
) -> str | None:
    """What to know of outputs of which this rank has a part; None where it has what its caller expects.

    A rank that gives rows of its own expects the results of these rows.
    """
    for x, spec in zip(outputs, specs, strict=True):
        split = {
            state.dim: name
            for state, (name, size) in zip(spec.layout, world.mesh.axes, strict=True)
            if state.kind == "S" and size > 1
        }
        if split.keys() - ({0} if batch == "local" else set()):
            along = " and ".join(f"dim {dim} ({axis})" for dim, axis in sorted(split.items()))
            return (
                f"model(...) returns each rank's part of its results: of one of shape {list(spec.shape)}, split along "
                f'{along}, this rank has {list(x.shape)}. autopar.compile(..., outputs="whole") gathers them for '
                'every rank, and outputs="dtensor" returns DTensors.'
            )
    return None


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
