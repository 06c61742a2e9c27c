"""Parameters become DTensor objects when a model is compiled, before their layout is known.

A Parameter object cannot turn into a DTensor one (their slots differ), but the content of a DTensor can be
swapped for another's. So `adopt` replaces every parameter at once by a replicated DTensor of the same
values; when the plan is there, that object takes its shard, and whoever holds it (an optimizer made in
between) holds the right one. Optimizers made even earlier are given the new objects at their next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar import _torch
from autopar.errors import CaptureError

Successors = dict[
    int, tuple["weakref.ref[nn.Parameter]", nn.Parameter]
]  # id of the old -> old, new


def adopt(model: nn.Module, device_mesh: DeviceMesh) -> Callable[[], None]:
    """Makes every parameter a replicated DTensor; returns what stops watching optimizers.

    Raises CaptureError for a model that is distributed already.
    """
    successors: Successors = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in successors:
                _refuse_distributed(parameter, f"{path}.{name}".lstrip("."))
                successors[id(parameter)] = (
                    weakref.ref(parameter),
                    _replicated(parameter, device_mesh),
                )
            module._parameters[name] = successors[id(parameter)][1]

    def succeed(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _replace_parameters(optimizer, successors)

    return register_optimizer_step_pre_hook(succeed).remove


def _refuse_distributed(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, DTensor):
        raise CaptureError(
            f"Parameter {name} is a DTensor already; compile a plain single-device model, once."
        )


def _replicated(parameter: nn.Parameter, device_mesh: DeviceMesh) -> nn.Parameter:
    placements = (Replicate(),) * device_mesh.ndim
    stored = _torch.dtensor(parameter.detach(), device_mesh, placements, tuple(parameter.shape))
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


def _replace_parameters(optimizer: Optimizer, successors: Successors) -> None:
    """Puts new parameters in the place of old ones in an optimizer's groups and state."""
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            reference, new = successors.get(id(parameter), (None, parameter))
            if reference is not None and reference() is parameter:
                group["params"][position] = new
                state = optimizer.state.pop(parameter, None)  # type: ignore[arg-type]
                if state is not None:
                    optimizer.state[new] = state
