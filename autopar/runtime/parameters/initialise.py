"""Initial values of parameters: broadcast from the first rank, or computed here for a meta-device model.

All ranks must begin with the same values, whatever their random states are. Tensors that have values on the first rank
get those, as in DDP, also where a state dict brought them to a model on the meta device (`make_room`). What is on the
meta device there is materialised module by module with one seed on all ranks, so that no rank ever holds more than one
module's full tensors beyond its own part.

Of a model with values a rank holds one full tensor on the device beyond its own part: no name here keeps a value while
the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import CaptureError, StepError
from autopar.runtime.ranks.world import World

InitFunction = Callable[[nn.Module], object]
Named = tuple[str, Tensor]


def initial_values(
    model: nn.Module, world: World, *, init_fn: InitFunction | None, seed: int, read_later: Container[str] = ()
) -> Iterator[Named]:
    """Yields every parameter's name and full value on the device, tied ones once; then sets buffers.

    Values of the names in `read_later` are undefined, because they are read from files later. A module of which all
    meta tensors are read later is not initialised.

    Raises CaptureError naming the module where a meta-device module cannot be initialised.
    """
    names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    absent = _without_values(model, world)
    with _torch.forked_random_state([world.device], seed):
        for path, module in model.named_modules():
            if not absent.isdisjoint(map(id, _own(module).values())):
                new = [n for n, x in _own(module).items() if id(x) in absent]
                initialise = _initialiser(model, module, path, new, init_fn, read_later)
                yield from _materialised(module, initialise, names, absent, world)
    for name, parameter in model.named_parameters():
        if id(parameter) in absent:
            continue
        if name in read_later:
            yield name, torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        else:
            yield name, _first_ranks(parameter, world)


def _first_ranks(parameter: nn.Parameter, world: World) -> Tensor:
    """The first rank's full value of a parameter, as a new tensor on the device."""
    value = _real(_torch.local_tensor(parameter), world)
    world.broadcast(value)
    return value


def _without_values(model: nn.Module, world: World) -> set[int]:
    """The ids of the parameters and buffers that are on the meta device on the first rank."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        return set()
    is_meta = torch.tensor([x.is_meta for x in tensors], dtype=torch.uint8, device=world.device)
    world.broadcast(is_meta)
    return {id(x) for x, meta in zip(tensors, is_meta.tolist(), strict=True) if meta}


def _real(x: Tensor, world: World) -> Tensor:
    """A copy of a tensor on the device; of one on the meta device its shape and format alone."""
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device=world.device)
    return x.to(world.device, copy=True, memory_format=torch.contiguous_format)


def make_room(model: nn.Module, given: Mapping[str, Any], *, assign: bool) -> None:
    """Gives memory to the tensors on the meta device that a state dict brings values for, where it has them.

    torch would copy these values into nothing.

    Args:
        model: the user's model, before there is a plan.
        given: state dict of whole tensors.
        assign: whether the tensors are to have the formats of the given ones.
    """
    for path, module in model.named_modules():
        for name, x in _own(module).items():
            value = given.get(f"{path}.{name}".lstrip("."))
            if not x.is_meta or not isinstance(value, Tensor) or value.shape != x.shape:
                continue
            dtype = value.dtype if assign else x.dtype
            real = torch.empty(x.shape, dtype=dtype, device=value.device)
            if name in module._buffers:
                module._buffers[name] = real
                continue
            if isinstance(x, DTensor):
                real = _torch.dtensor(real, x.device_mesh, x.placements, tuple(x.shape))
            torch.utils.swap_tensors(x, nn.Parameter(real, x.requires_grad))


def refuse_without_values(model: nn.Module, missing: Sequence[str]) -> None:
    """Raises StepError if a state dict left parameters on the meta device that are not `missing` in it."""
    lost = [name for name, p in model.named_parameters() if p.is_meta and name not in missing]
    if lost:
        raise StepError(
            f"load_state_dict gave no values to {lost[0]} (and {len(lost) - 1} more), which stays on the meta device: "
            "its entry in the state dict has another name, or is on the meta device itself. Give real tensors under "
            "the names of state_dict(), or load after the plan is made (example_inputs= of autopar.compile)."
        )


def replaced_values(model: nn.Module, names: Sequence[str], world: World) -> Iterator[Named]:
    """Yields the first rank's full values of parameters that replaced others."""
    parameters = dict(model.named_parameters())
    for name in names:
        if parameters[name].is_meta:
            raise CaptureError(f"Parameter {name} was replaced by one on the meta device, which has no values.")
        yield name, _first_ranks(parameters[name], world)


def place_buffers(model: nn.Module, world: World) -> None:
    """Moves every buffer to the device, with the values of the first rank."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _first_ranks_buffer(buffer.detach(), world)


def _first_ranks_buffer(buffer: Tensor, world: World) -> Tensor:
    """The first rank's values of a buffer, as a new tensor on the device; sparse ones travel as dense ones."""
    if buffer.layout == torch.strided:
        placed = _real(buffer, world)
        world.broadcast(placed)
        return placed
    dense = _real(buffer.to_dense(), world)
    world.broadcast(dense)
    return dense.to_sparse(layout=buffer.layout)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of one module by their names in it."""
    own = {**module._parameters, **module._buffers}
    return {name: x for name, x in own.items() if x is not None}


def _materialised(
    module: nn.Module, initialise: InitFunction, names: dict[int, str], absent: set[int], world: World
) -> Iterator[Named]:
    """Initialises one module with real tensors in place of its own; yields the values of the `absent` parameters.

    Of tied parameters the first module gives the values. Parameters and buffers that have values keep them.
    """
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in parameters.items():
        real = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        module._parameters[name] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    buffers = {name: x for name, x in module._buffers.items() if x is not None}
    for name, buffer in buffers.items():
        module._buffers[name] = _real(buffer, world)
    with torch.no_grad():
        initialise(module)
    module._buffers.update({n: x for n, x in buffers.items() if id(x) not in absent})
    for name, parameter in parameters.items():
        value = module._parameters[name]
        assert value is not None
        module._parameters[name] = parameter
        if id(parameter) in absent and id(parameter) in names:
            yield names.pop(id(parameter)), value.detach()


def _initialiser(
    model: nn.Module,
    module: nn.Module,
    path: str,
    new: Sequence[str],
    init_fn: InitFunction | None,
    read_later: Container[str],
) -> InitFunction:
    """The function that initialises one module, of which the tensors of the names `new` have no values."""
    prefix = f"{path}." if path else ""
    if all(prefix + name in read_later for name in new):
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
