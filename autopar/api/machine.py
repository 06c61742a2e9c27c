"""The machine and the mesh that a call of `compile` names."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.cost_model import Hardware
from autopar.cost_model.software import named_hardware
from autopar.errors import MeshError
from autopar.ir import (
    PIPELINE_AXIS,
    Mesh,
    Plan,
    pipeline_position,
    with_pipeline,
    without_pipeline,
)
from autopar.runtime.processes import axes_of_device_mesh

MeshLike = DeviceMesh | Mesh | Mapping[str, int] | str


def hardware_of(
    hardware: Hardware | str | os.PathLike[str] | None, device: torch.device
) -> tuple[Hardware, tuple[str, ...]]:
    """The machine that the cost model uses, and notes for the plan.

    Args:
        hardware: a name in the catalogue, the path of a TOML file, or the machine itself; None takes `cpu-gloo`
            for the device type `cpu` and `h100` for every other.
        device: the device that this rank computes on.

    Returns:
        The machine, and one note that says that it was guessed from the device; no note if `hardware` was given.
    """
    if hardware is not None:
        return named_hardware(hardware), ()
    name = _torch.catalogue_name(device)
    return named_hardware(name), (f"priced for {name}, a guess from the device {device.type}",)


def axes_of(mesh: MeshLike | None, plan: Plan | None) -> Mesh | None:
    """The mesh as data, None if it is to be searched. Raises MeshError where plan and mesh differ."""
    if mesh is None:
        return plan.world_mesh if plan is not None else None
    axes = axes_of_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else Mesh.of(mesh)
    if dict(axes.axes).get(PIPELINE_AXIS) == 1:
        axes = without_pipeline(axes)
    if axes.names == (PIPELINE_AXIS,):  # every stage has a mesh, if one of a single rank
        axes = Mesh((*axes.axes, *without_pipeline(axes).axes))
    elif PIPELINE_AXIS in axes.names:
        axes = with_pipeline(
            without_pipeline(axes), dict(axes.axes)[PIPELINE_AXIS], pipeline_position(axes)
        )
    if plan is None:
        return axes
    if not axes.admits(plan.world_mesh):
        raise MeshError(
            f"The plan was made for the mesh {plan.world_mesh}, and the mesh given is {axes}."
        )
    return plan.world_mesh  # with the order of its axes
