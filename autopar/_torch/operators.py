"""Operators of torch.ops: names, schemas and overloads; products of matrices in float8 tiles by torch's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_TORCHS = ("aten", "prims")
_OF_FILES = ("from_file",)
_TILED = (9, 0)  # compute capability of the GPUs whose kernel takes a scale for each 1x128 numbers
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)  # formats in which the kernel gives results


def schema(operator: Any) -> torch.FunctionSchema:
    """The schema of an operator's overload: names, types and defaults of its arguments."""
    return operator._schema


def autopar_op(name: str) -> Any:
    """The default overload of `torch.ops.autopar.<name>`."""
    return getattr(torch.ops.autopar, name).default


def required_arguments(name: str) -> int | None:
    """The number of arguments that an ATen operator requires; None where there is no operator of this name."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    arguments = packet.default._schema.arguments
    return sum(not a.has_default_value() and not a.kwarg_only for a in arguments)


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """The function of other operators that torch, or the operator's library, has for an operator; None without one."""
    if operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return lambda *args, **kwargs: operator.decompose(*args, **kwargs)
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator)


def is_torchs_operator(operator: OpOverload) -> bool:
    """Whether torch itself has registered an operator."""
    return operator.namespace in _TORCHS


def operator_named(name: str) -> OpOverload | None:
    """The overload of torch's own with a name such as `aten.add.Tensor`; None where there is none.

    An operator that reads or writes files is not among them.
    """
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in _TORCHS or packet in _OF_FILES:
        return None
    found: Any = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return found if isinstance(found, OpOverload) else None


def argument_names(operator: OpOverload) -> frozenset[str]:
    """Names of the arguments that an operator takes."""
    return frozenset(argument.name for argument in operator._schema.arguments)


def multiplies_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `product_of_tiles` runs on a device and gives results of a format.

    >>> multiplies_tiles(torch.device("cpu"), torch.bfloat16)
    False
    """
    if device.type != "cuda" or torch.version.hip is not None or dtype not in _RESULTS:
        return False
    return torch.cuda.get_device_capability(device) == _TILED


def product_of_tiles(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left @ right.T by `torch._scaled_mm`, which sums in float32.

    Args:
        left: numbers in float8 e4m3 of shape (rows, k), and float32 scales of shape (rows, k / 128).
        right: the same of shape (columns, k) and (columns, k / 128).
        dtype: format of the result, of shape (rows, columns).
    """
    # The kernel wants the scales of neighbouring rows next to each other.
    scales = [x.t().contiguous().t() for x in (left[1], right[1])]
    return torch._scaled_mm(left[0], right[0].t(), scale_a=scales[0], scale_b=scales[1].t(), out_dtype=dtype)
