"""The device, the machine and the mesh that a call of `compile` names or leaves open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.calibrate.at_start import measured_at_start
from autopar.cost_model import Hardware
from autopar.cost_model.machines.software import named_hardware
from autopar.errors import AutoparError, MeshError
from autopar.ir import PIPELINE_AXIS, Mesh, Plan, pipeline_position, with_pipeline, without_pipeline
from autopar.ir.note import Note
from autopar.runtime.ranks.processes import axes_of_device_mesh
from autopar.units import format_seconds

MeshLike = DeviceMesh | Mesh | Mapping[str, int] | str


def device_of(model: nn.Module, mesh: MeshLike | None, device: torch.device | str | None) -> torch.device:
    """The device that this rank computes on.

    [Note: the device of a rank] A device that is given is taken, and a model that is on an accelerator stays there.
    A launcher starts one rank for each accelerator, so a model on the processor or the meta device then goes to this
    rank's accelerator. Without a launcher it stays, as with `torch.compile`, because nobody asked for a device. It
    also stays if the script has made a mesh of processors, or a process group with only Gloo.

    Raises AutoparError for a model on several devices, and for a device that is not there.
    """
    if device is not None:
        return _numbered(torch.device(device))
    own = {p.device for p in model.parameters() if not p.is_meta} or {_torch.CPU}
    if len(own) > 1:
        raise AutoparError(
            f"The model lies on several devices ({', '.join(sorted(map(str, own)))}); move it to one, or "
            "pass device=... to autopar.compile."
        )
    (found,) = own
    if _torch.is_accelerator(found):
        return found
    if isinstance(mesh, DeviceMesh):
        return _numbered(torch.device(mesh.device_type))
    offered = _torch.accelerator_of_rank()
    if offered is None or not _serves(offered):
        return found
    return offered


def _serves(device: torch.device) -> bool:
    """Whether the process group communicates on a device by its own backend; so will one that is not made yet."""
    return not dist.is_initialized() or _torch.uses_own_backend(device)


def _numbered(device: torch.device) -> torch.device:
    """The device with its number, which is this rank's where none was given; processors have none.

    Raises AutoparError for an accelerator that torch does not find.
    """
    if not _torch.is_accelerator(device):
        return torch.device(device.type)
    count = _torch.accelerator_count(device.type)
    if (device.index or 0) >= count:
        raise AutoparError(
            f"device={str(device)!r} is not there: torch {torch.__version__} finds {count} devices of the kind "
            f"{device.type} here. Pass device='cpu' to train on processors, or install a build of torch for your "
            "accelerator."
        )
    if device == torch.device(device.type):
        return _torch.accelerator_of_rank() or _torch.current_device(device.type)
    return device


def words_of_device(device: torch.device) -> str:
    """The end of the start line: the device that ranks compute on and the backend by which they communicate."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return f"on {device.type} over {_torch.backend_in_use(device)}"
    offered = _torch.accelerator_kind()
    if _torch.is_accelerator(device) or offered is None:
        return f"on {device}"
    return f"on {device}, although an accelerator is idle; device={offered!r} uses it"


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
    found = named_hardware(_torch.catalogue_name(device))
    return found, (guessed_note(found, device),)


def measured_hardware(hardware: Hardware, folder: Path | None) -> tuple[Hardware, tuple[str, ...]]:
    """The guessed figures of processors with launch and message times measured here, and a note for the plan.

    Args:
        hardware: the processors of the catalogue.
        folder: folder that keeps what was measured for the next start; None keeps nothing.
    """
    found = measured_at_start(hardware, folder)
    if found is hardware:
        return found, (guessed_note(found, _torch.CPU),)
    words = f"{format_seconds(found.launch_seconds)} for an op"
    if found.source("inside_node.latency_seconds").kind == "measured":
        words += f", {format_seconds(found.inside_node.latency_seconds)} for a message"
    return found, (f"priced for {found.name}, with what this machine took at the start: {words}",)


def guessed_note(hardware: Hardware, device: torch.device) -> Note:
    """The note of a plan for hardware that was guessed from a device."""
    return Note(f"priced for {hardware.name}, a guess from the device {device.type}", "guess")


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
        axes = with_pipeline(without_pipeline(axes), dict(axes.axes)[PIPELINE_AXIS], pipeline_position(axes))
    if plan is None:
        return axes
    if not axes.admits(plan.world_mesh):
        raise MeshError(f"The plan was made for the mesh {plan.world_mesh}, but the mesh given is {axes}.")
    return plan.world_mesh  # with the order of its axes
