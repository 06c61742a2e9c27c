"""Initial values of parameters: broadcast from the first rank, or made here for a meta-device model.

Every rank must begin with the same values, whatever its own random state was. A model with real
weights takes the first rank's, as in DDP. A model on the meta device is materialised module by module
with one seed on all ranks, so that no rank ever holds more than one module's full tensors beyond its
own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import CaptureError
from autopar.runtime.world import World

InitFunction = Callable[[nn.Module], object]
Named = tuple[str, Tensor]


def initial_values(
    model: nn.Module, world: World, *, init_fn: InitFunction | None, seed: int
) -> Iterator[Named]:
    """Yields every parameter's name and full value on the device, tied ones once; then sets buffers.

    Raises CaptureError naming the module where a meta-device module cannot be initialised.
    """
    names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    done: set[int] = set()
    with torch.random.fork_rng(_devices(world.device)):
        torch.manual_seed(seed)
        for path, module in model.named_modules():
            if any(x.is_meta for x in _own(module)):
                yield from _materialised(module, path, names, done, world, init_fn)
    for name, parameter in model.named_parameters():
        if id(parameter) not in done:
            value = _torch.local_tensor(parameter).to(world.device, copy=True).contiguous()
            world.broadcast(value)
            yield name, value


def replaced_values(model: nn.Module, names: Sequence[str], world: World) -> Iterator[Named]:
    """Yields the first rank's full values of parameters that took the place of others."""
    parameters = dict(model.named_parameters())
    for name in names:
        if parameters[name].is_meta:
            raise CaptureError(
                f"Parameter {name} was replaced by one on the meta device, which has no values."
            )
        value = _torch.local_tensor(parameters[name]).to(world.device, copy=True).contiguous()
        world.broadcast(value)
        yield name, value


def place_buffers(model: nn.Module, world: World) -> None:
    """Moves every buffer to the device, with the values of the first rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                placed = buffer.detach().to(world.device).contiguous()
                world.broadcast(placed)
                module._buffers[name] = placed


def _devices(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]


def _own(module: nn.Module) -> list[Tensor]:
    own = [*module._parameters.values(), *module._buffers.values()]
    return [x for x in own if x is not None]


def _materialised(
    module: nn.Module,
    path: str,
    names: dict[int, str],
    done: set[int],
    world: World,
    init_fn: InitFunction | None,
) -> Iterator[Named]:
    """Gives one module real tensors, initialises them, and takes its own objects back."""
    initialise = init_fn or _reset_function(module, path)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in parameters.items():
        real = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        module._parameters[name] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=world.device)
    with torch.no_grad():
        initialise(module)
    for name, parameter in parameters.items():
        value = module._parameters[name]
        assert value is not None
        module._parameters[name] = parameter
        if id(parameter) not in done:
            done.add(id(parameter))
            yield names[id(parameter)], value.detach()


def _reset_function(module: nn.Module, path: str) -> InitFunction:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise CaptureError(
            f"Module {path or 'the model itself'} ({type(module).__name__}) is on the meta device and has "
            "no reset_parameters() to make its values; give it one, or pass init_fn=... to autopar.compile."
        )
    return lambda _: reset()
