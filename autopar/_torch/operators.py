"""Operators of torch.ops: their schemas and their overloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
