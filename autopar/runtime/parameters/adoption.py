"""Parameters become DTensor objects when a model is compiled, before their layout is known.

A Parameter object cannot become a DTensor (their slots differ), but the content of a DTensor can be swapped for
another's. So `adopt` immediately replaces every parameter by a replicated DTensor with the same values. When there is a
plan, this object takes its shard, and an optimizer that was made in between still holds the right object. Optimizers
that were made before `adopt` get the new objects at their next step.

The original model cannot run any more, because torch does not mix DTensors with plain tensors. Methods that call it
(`generate` of transformers) would fail somewhere inside; a forward pre-hook raises an error first, with a remedy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar import _torch
from autopar._torch.pytree import tree_leaves
from autopar.errors import CaptureError, StepError
from autopar.runtime.ranks.world import Pipe

# id of the old -> old, new
Successors = dict[int, tuple["weakref.ref[nn.Parameter]", nn.Parameter]]


class Adoption:
    """The parameters of a model as DTensors, and the optimizers that must hold these DTensors.

    Attributes:
        mesh: the mesh on which the parameters lie before there is a plan, if they do.
        pipe: this rank's place along the pipeline, once there are stages.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh
        self._successors: Successors = {}
        self._own: set[int] = set()  # ids of the DTensors that parameters have become
        self._took_gradient: set[int] = set()  # ids of those that took a gradient over
        self._ends = [
            _followed_by(self.follow),
            _torch.update_by_shards(self._owns),
            _torch.share_overflows(self._stages_of),
            _torch.refuse_parts(self._lies_alike),
        ]
        self.pipe: Pipe | None = None
        _torch.treat_as_plain()

    def stop(self) -> None:
        """Stops the replacement of parameters in optimizers."""
        for end in self._ends:
            end()

    @property
    def adopted(self) -> list[nn.Parameter]:
        """The DTensors that replaced the parameters."""
        return [new for _, new in self._successors.values()]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Registers that optimizers replace `old` by `new`."""
        for key, (reference, successor) in list(self._successors.items()):
            if successor is old:
                self._successors[key] = (reference, new)
        self._successors[id(old)] = (weakref.ref(old), new)
        self._own.discard(id(old))
        self._own.add(id(new))
        if new.grad is not None:
            self._took_gradient.add(id(new))

    def drop_cleared_gradients(self) -> None:
        """Drops gradients that were taken over from parameters and that an optimizer of those has cleared since."""
        for reference, new in self._successors.values():
            old = reference()
            is_cleared = old is not None and old.grad is None
            if new is not old and is_cleared and id(new) in self._took_gradient:
                new.grad = None

    def _owns(self, parameter: Tensor) -> bool:
        return id(parameter) in self._own

    def _lies_alike(self, x: DTensor) -> bool:
        """Whether a tensor lies on the mesh of these parameters, as what is made of them does."""
        own = next((p for p in self.adopted if isinstance(p, DTensor)), None)
        return own is not None and x.device_mesh in (own.device_mesh, self.mesh)

    def _stages_of(self, optimizer: Optimizer) -> dist.ProcessGroup | None:
        """The ranks that have an optimizer's other parameters, where there are stages."""
        if self.pipe is None:
            return None
        self.follow(optimizer)
        held = (p for group in optimizer.param_groups for p in group["params"])
        return self.pipe.group if any(map(self._owns, held)) else None

    def follow(self, optimizer: Optimizer) -> None:
        """Replaces old parameters in an optimizer by their registered successors, and cuts states that were loaded."""
        _replace_parameters(optimizer, self._successors)
        _torch.cut_loaded_states(optimizer, self._owns)


def _followed_by(follow: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Calls a function before each step of every optimizer; returns a function that ends it."""
    _followers().append(follow)
    return lambda: _followers().remove(follow)


@functools.cache
def _followers() -> list[Callable[[Optimizer], None]]:
    """The functions that are called before steps; the first call registers one hook for all of them.

    A model that is freed in the middle of a step takes its function out of this list, and none out of torch's hooks,
    over which that step may be iterating.
    """
    found: list[Callable[[Optimizer], None]] = []

    def follow(optimizer: Optimizer, *_: Any) -> None:
        for each in tuple(found):
            each(optimizer)

    register_optimizer_step_pre_hook(follow)
    return found


def adopt(
    model: nn.Module, device_mesh: DeviceMesh, earlier: Adoption | None = None, planned: DeviceMesh | None = None
) -> Adoption:
    """Replaces every parameter by a replicated DTensor; after an earlier adoption, only the new parameters.

    These may be shards, or owners' parts, of copies that the script made of the model's layers: they are gathered.

    Args:
        model: the user's model.
        device_mesh: any mesh over all ranks, on which the DTensors lie.
        earlier: what an earlier call returned.
        planned: the mesh of the plan, if there is one; its axes may have another order.

    Raises CaptureError for a model that is distributed already.
    """
    adoption = earlier or Adoption(device_mesh)
    successors = {id(p): p for p in adoption.adopted}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in successors:
                whole = parameter
                if earlier is not None and _lies_on(parameter, (device_mesh, planned)):
                    whole = nn.Parameter(_gathered(parameter), parameter.requires_grad)
                    if isinstance(parameter.grad, DTensor):
                        whole.grad = _gathered(parameter.grad)
                _refuse_distributed(whole, f"{path}.{name}".lstrip("."))
                successors[id(parameter)] = _replicated(whole, device_mesh)
                adoption.replace(parameter, successors[id(parameter)])
                successors[id(successors[id(parameter)])] = successors[id(parameter)]
            module._parameters[name] = successors[id(parameter)]
    if earlier is None:
        model.register_forward_pre_hook(refuse_plain, with_kwargs=True, prepend=True)
    return adoption


def refuse_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises StepError if a model of DTensors is called with plain tensors, as no captured program does.

    It depends on the given module alone. So a copy of the model, or the model with other parameters
    (`torch.func.functional_call`, capture), is judged by its own parameters.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    is_plain = bool(given) and not any(isinstance(x, DTensor) for x in given)
    if not is_plain or _torch.replicates_implicitly():
        return
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise StepError(
            f"The {type(model).__name__} that was compiled was called directly, with plain tensors, but its parameters "
            "are DTensors now, and torch does not mix the two. Call the compiled module, or its step. A method that "
            "calls the model (generate) needs a plain copy with whole weights (docs/checkpoints.md, whole weights), "
            "or a model under torch.compile(model, backend='autopar')."
        )


def _lies_on(parameter: nn.Parameter, meshes: Sequence[DeviceMesh | None]) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh in meshes


def _gathered(parameter: DTensor) -> Tensor:
    """The whole of a parameter in equal shards, or of a copy of an owner's, which torch takes for shards too."""
    if parameter.to_local().numel() * _torch.parts_of(parameter) == parameter.numel():
        return parameter.full_tensor().detach()
    return _torch.whole_of(parameter)


def _refuse_distributed(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, DTensor):
        raise CaptureError(
            f"Parameter {name} is a DTensor already, of another compiled model or of FSDP. Compile a plain "
            "single-device model, once; modules that share parameters, or one module with several losses, become one "
            "compiled module (docs/training.md, several losses over one module)."
        )


def _replicated(parameter: nn.Parameter, device_mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of the same values and gradient on every rank."""
    placements = (Replicate(),) * device_mesh.ndim

    def over(x: Tensor) -> DTensor:
        return _torch.dtensor(x.detach(), device_mesh, placements, tuple(x.shape))

    new = nn.Parameter(over(parameter), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        new.grad = over(parameter.grad.to_dense())
    return new


def _replace_parameters(optimizer: Optimizer, successors: Successors) -> None:
    """Puts new parameters in the place of old ones in an optimizer's groups and state."""
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            reference, new = successors.get(id(parameter), (None, parameter))
            if reference is None or reference() is not parameter:
                new = parameter
            kept.append(new)
            if new is not parameter:
                state = optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[new] = state
        group["params"][:] = kept
