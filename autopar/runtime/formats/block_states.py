"""Writes optimizer states that are quantised in blocks to checkpoints, and reads them back.

[Note: states in blocks] The optimizers of torchao keep 8-bit, 4-bit or fp8 codes, with a scale for each block of
consecutive elements of a rank's own part. Another plan cuts a parameter into other parts, whose blocks begin
elsewhere. A checkpoint therefore has both

    <key>           the values in float32, which any plan and any optimizer can read
    <key>:codes     the tensors that the state is made of, part after part, for a plan that cuts this
    <key>:scale     parameter as the saved one did

A plan with the same parts reads codes and scales, so that the state is the same bit for bit. Under any other plan
the values are quantised again, which rounds each by at most half a step of its new block. Nothing here knows
torchao: a state in blocks is a tensor that is made of others (`__tensor_flatten__`) and has its values
(`dequantize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from autopar import _torch
from autopar.errors import AutoparError


def in_blocks(state: object) -> bool:
    """Whether a state is quantised in blocks on this rank."""
    local = _torch.local_of(state)
    return type(local) is not Tensor and hasattr(local, "__tensor_flatten__")


def values_of(state: Tensor) -> Tensor:
    """The values of a state in blocks, in float32 and laid out as the state; any other tensor as it is."""
    if not in_blocks(state):
        return state
    local = _torch.local_of(state).dequantize(torch.float32)
    if not isinstance(state, DTensor):
        return local
    return _torch.dtensor(local, state.device_mesh, state.placements, tuple(state.shape))


def set_values(state: Tensor, values: Tensor) -> None:
    """Writes values, laid out as the state, into it in its own format."""
    _torch.local_of(state).copy_(_torch.local_of(values).to(torch.float32))


def parts_of(state: Tensor) -> dict[str, Tensor]:
    """The tensors that a state in blocks is made of, flat, each rank's after the other; in the state's own memory.

    Raises AutoparError for a state of which ranks hold parts of different sizes.
    """
    local = _torch.local_of(state)
    if isinstance(state, DTensor) and _is_uneven(state, local):
        raise AutoparError(
            f"The optimizer keeps a state of shape {list(state.shape)} in blocks of low precision, but the ranks do "
            "not divide it, so that they have parts of different sizes: no checkpoint can hold that yet. Take an "
            "optimizer with states in float32 or bfloat16 (torch.optim.AdamW), or a number of ranks that divides it."
        )
    names, _ = local.__tensor_flatten__()
    return {name: _in_a_row(getattr(local, name), state) for name in names}


def _is_uneven(state: DTensor, local: Tensor) -> bool:
    """Whether the parts of a state that no rank owns alone differ in size."""
    if any(isinstance(placement, _torch.Owned) for placement in state.placements):
        return False
    return local.numel() * _torch.parts_of(state) != state.numel()


def cut_of(state: Tensor) -> list[str]:
    """The cut of a state, which determines its blocks: the dims along which it is split, and the numbers of parts."""
    if not isinstance(state, DTensor):
        return []
    sizes = zip(state.placements, state.device_mesh.shape, strict=True)
    return [f"{placement} {size}" for placement, size in sizes if size > 1 and placement.is_shard()]


def entries(states: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, key, tensor) for every entry of the states in a checkpoint, see [Note: states in blocks]."""
    for name, own in states.items():
        for key, state in own.items():
            yield name, key, values_of(state)
            if in_blocks(state):
                for part, tensor in parts_of(state).items():
                    yield name, f"{key}:{part}", tensor


def cuts_of(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[str]]:
    """`<parameter>.<key>` of every state in blocks -> its cut, which determines its blocks."""
    return {
        f"{name}.{key}": cut_of(state) for name, own in states.items() for key, state in own.items() if in_blocks(state)
    }


def fill_states(optimizer: Optimizer) -> None:
    """Makes an optimizer with block-wise states allocate these states in its own formats, if it has none yet.

    It makes them in its first step, which is run here with gradients and a learning rate of zero, so that
    parameters stay as they are. Gradients that are there stay, too.
    """
    is_torchao = hasattr(optimizer, "block_size") and hasattr(optimizer, "_new_buffer")
    if not is_torchao or optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [p.grad for p in trained]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(torch.as_tensor(group["lr"]))
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, gradient in zip(trained, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def formats_here(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The states of a parameter that the optimizer keeps in another number format than the parameter's."""
    own: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return {
        key: state
        for key, state in own.items()
        if in_blocks(state) or (isinstance(state, Tensor) and _differs(key, state, parameter))
    }


def _differs(key: str, state: Tensor, parameter: nn.Parameter) -> bool:
    return key != "step" and state.is_floating_point() and state.dtype is not parameter.dtype


def _in_a_row(part: Tensor, state: Tensor) -> Tensor:
    """One of the tensors a state is made of, flat; codes as bytes, because not every file format has theirs."""
    flat = part.detach().view(-1)
    flat = flat if flat.dtype is torch.float32 else flat.view(torch.uint8)
    if not isinstance(state, DTensor):
        return flat
    placements = [Shard(0) if p.is_shard() else Replicate() for p in state.placements]
    return _torch.dtensor(flat, state.device_mesh, placements)
