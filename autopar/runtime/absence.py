"""Parameters that lie on other ranks of the pipeline are taken out of the model.

They are None in their modules, as torch's own pipeline examples have it, so that `parameters()`,
optimizers and checkpoints see what this rank holds.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from autopar import _torch
from autopar.runtime.adoption import Adoption
from autopar.runtime.stand_ins import Absent


def take_out(
    model: nn.Module, held: Container[str], adoption: Adoption, device_mesh: DeviceMesh
) -> list[Absent]:
    """Takes out of a model, and of the optimizers that follow it, all parameters but those held."""
    absent: list[Absent] = []
    likenesses: dict[int, nn.Parameter] = {}
    leaving = {id(p): p for name, p in model.named_parameters() if name not in held}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in leaving:
                like = likenesses.setdefault(id(parameter), _likeness(parameter))
                absent.append(Absent(module, key, like))
                module._parameters[key] = None
    for parameter in leaving.values():
        _empty(parameter, device_mesh)
        adoption.replace(parameter, None)
    return absent


def _likeness(parameter: nn.Parameter) -> nn.Parameter:
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(like, parameter.requires_grad)


def _empty(parameter: nn.Parameter, device_mesh: DeviceMesh) -> None:
    """Frees the values, which an optimizer may hold until its next step."""
    nothing = torch.empty(0, dtype=parameter.dtype)
    placements = (Replicate(),) * device_mesh.ndim
    stored = _torch.dtensor(nothing, device_mesh, placements, (0,))
    parameter.grad = None
    torch.utils.swap_tensors(parameter, nn.Parameter(stored, requires_grad=False))
