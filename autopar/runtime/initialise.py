"""Initial values of parameters: broadcast from the first rank, or computed here for a meta-device model.

All ranks must begin with the same values, whatever their random states are. A model with real weights
gets those of the first rank, as in DDP. A model on the meta device is materialised module by module
with one seed on all ranks, so that no rank ever holds more than one module's full tensors beyond its
own part.

Of a model with values a rank holds one full tensor on the device beyond its own part: no name here keeps a value while
the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import CaptureError
from autopar.runtime.world import World

InitFunction = Callable[[nn.Module], object]
Named = tuple[str, Tensor]


def initial_values(
    model: nn.Module,
    world: World,
    *,
    init_fn: InitFunction | None,
    seed: int,
    read_later: Container[str] = (),
) -> Iterator[Named]:
    """Yields every parameter's name and full value on the device, tied ones once; then sets buffers.

    Values of the names in `read_later` are undefined, because they are read from files later. A module of which all
    meta tensors are read later is not initialised.

    Raises CaptureError naming the module where a meta-device module cannot be initialised.
    """
    names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    done: set[int] = set()
    with _torch.forked_random_state([world.device]):
        torch.manual_seed(seed)
        for path, module in model.named_modules():
            if any(x.is_meta for x in _own(module).values()):
                initialise = _initialiser(model, module, path, init_fn, read_later)
                yield from _materialised(module, initialise, names, done, world)
    for name, parameter in model.named_parameters():
        if id(parameter) in done:
            continue
        if name in read_later:
            yield name, torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        else:
            yield name, _first_ranks(parameter, world)


def _first_ranks(parameter: nn.Parameter, world: World) -> Tensor:
    """The first rank's full value of a parameter, as a new tensor on the device."""
    own = _torch.local_tensor(parameter)
    value = own.to(world.device, copy=True, memory_format=torch.contiguous_format)
    world.broadcast(value)
    return value


def replaced_values(model: nn.Module, names: Sequence[str], world: World) -> Iterator[Named]:
    """Yields the first rank's full values of parameters that replaced others."""
    parameters = dict(model.named_parameters())
    for name in names:
        if parameters[name].is_meta:
            raise CaptureError(
                f"Parameter {name} was replaced by one on the meta device, which has no values."
            )
        yield name, _first_ranks(parameters[name], world)


def place_buffers(model: nn.Module, world: World) -> None:
    """Moves every buffer to the device, with the values of the first rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                placed = buffer.detach().to(world.device).contiguous()
                world.broadcast(placed)
                module._buffers[name] = placed


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of one module by their names in it."""
    own = {**module._parameters, **module._buffers}
    return {name: x for name, x in own.items() if x is not None}


def _materialised(
    module: nn.Module,
    initialise: InitFunction,
    names: dict[int, str],
    done: set[int],
    world: World,
) -> Iterator[Named]:
    """Gives one module real tensors, initialises them, and takes its own objects back."""
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


def _initialiser(
    model: nn.Module,
    module: nn.Module,
    path: str,
    init_fn: InitFunction | None,
    read_later: Container[str],
) -> InitFunction:
    """The function that initialises the parameters of one module, which is on the meta device."""
    prefix = f"{path}." if path else ""
    if all(prefix + name in read_later for name, x in _own(module).items() if x.is_meta):
        return lambda _: None
    if init_fn is not None:
        return init_fn
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        return lambda _: reset()
    # The method by which models of transformers initialise one module.
    of_model = getattr(model, "_init_weights", None)
    if of_model is not None:
        return of_model
    raise CaptureError(
        f"Module {path or 'the model itself'} ({type(module).__name__}) is on the meta device and has "
        "no reset_parameters() to make its values; give it one, or pass init_fn=... to autopar.compile."
    )
