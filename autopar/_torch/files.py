"""Tensors whose memory is a file, and parameters whose optimizer states are such tensors too.

[Note: states in files] The optimizers of torch make the states of a parameter p by `torch.zeros_like(p)` and the like,
in ordinary memory. A parameter of a class below has its own `__torch_function__`, which makes these tensors by the
function that it was given, and leaves all other calls to torch. Such a call returns a plain tensor, or a plain DTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import dtensor

# Shape and element type -> a tensor without values yet.
MakeEmpty = Callable[[torch.Size, torch.dtype], Tensor]


def map_file(path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that shares its memory with a file, which must be large enough; a write to one shows in the other.

    The file may be unlinked as soon as this returns: its space is given back with the tensor's memory.
    """
    size_bytes = shape.numel() * dtype.itemsize
    storage = torch.UntypedStorage.from_file(path, True, size_bytes)
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    found: Tensor = flat.view(dtype).view(shape)
    return found


class _StatesElsewhere:
    """Parameters for which `torch.zeros_like` and the like allocate tensors by `make_empty`."""

    make_empty: MakeEmpty

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _FILLS and isinstance(args[0], _StatesElsewhere):
            return _FILLS[func](_alike(args[0], kwargs or {}), *args[1:])
        return torch._C._disabled_torch_function_impl(func, types, args, dict(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy in ordinary memory."""
        assert isinstance(self, Tensor)
        found = nn.Parameter(copy.deepcopy(self.detach(), memo), self.requires_grad)
        memo[id(self)] = found
        return found


class ParameterInFile(_StatesElsewhere, nn.Parameter):
    """A parameter that is a plain tensor; its optimizer states are made in files, see [Note: states in files]."""


class DTensorInFile(_StatesElsewhere, DTensor):
    """A parameter that is a DTensor; its optimizer states are made in files, see [Note: states in files]."""


def _alike(parameter: Any, options: Mapping[str, Any]) -> Tensor:
    """An uninitialised tensor with a parameter's shape and layout."""
    dtype = options.get("dtype") or parameter.dtype
    if not isinstance(parameter, DTensor):
        made: Tensor = parameter.make_empty(parameter.shape, dtype)
        return made
    make_empty: MakeEmpty = parameter.make_empty  # type: ignore[attr-defined]
    local = make_empty(parameter._local_tensor.shape, dtype)
    return dtensor(local, parameter.device_mesh, parameter.placements, tuple(parameter.shape))


_FILLS: Mapping[Any, Callable[..., Tensor]] = {
    torch.empty_like: lambda x: x,
    torch.zeros_like: lambda x: x.zero_(),
    torch.ones_like: lambda x: x.fill_(1),
    torch.full_like: lambda x, value: x.fill_(value),
}


def make_states_by(make_empty: MakeEmpty, parameter: nn.Parameter) -> None:
    """Sets the function that allocates tensors made like a parameter, such as the optimizer's states.

    Args:
        make_empty: function of a shape and a dtype that returns an uninitialised tensor.
        parameter: a plain parameter, or one that is a DTensor, whose states are made of local tensors.
    """
    found: Any = parameter
    found.__class__ = DTensorInFile if isinstance(parameter, DTensor) else ParameterInFile
    found.make_empty = make_empty
