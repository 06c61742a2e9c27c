"""A mixed-precision policy at capture: the model is called with cast parameters and inputs, and the casts of
parameters are then taken out of the graph, whose placeholders stand for the cast copies.

The runtime makes those copies once a step, before it gathers parameters (`autopar.runtime.parameters.parameters`).
Buffers keep their dtype. Weights of batch normalization keep theirs too, because its kernels need them in the dtype of
the statistics, as in FSDP's `MixedPrecision(_module_classes_to_ignore=...)`. Products of linear layers may be
rounded to float8 (`autopar.capture.float8`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar._torch import BatchNormBase, pytree
from autopar.capture.checks import refusing_changed_arguments
from autopar.capture.float8 import rounded_products
from autopar.ir import MixedPrecision

aten = torch.ops.aten


def dtype_of(name: str) -> torch.dtype:
    """The torch.dtype that a policy names."""
    found: torch.dtype = getattr(torch, name)
    return found


def call_cast(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: MixedPrecision) -> Any:
    """Calls a model under a policy, as a single device would run it; gradients reach the original parameters."""
    dtype = dtype_of(policy.param_dtype)
    parameters = {name: p.to(dtype) for name, p in cast_parameters(model)}
    args, kwargs = _cast((args, kwargs), dtype)
    with rounded_products(model, parameters, policy), refusing_changed_arguments((args, kwargs)):
        result = _torch.call_with(model, parameters, args, kwargs)
    return result if policy.output_dtype is None else _cast(result, dtype_of(policy.output_dtype))


def cast_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a policy casts, by name; tied ones under their first name."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, BatchNormBase)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            yield name, parameter


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def absorb_casts(
    module: fx.GraphModule, parameters: Mapping[str, str], policy: MixedPrecision
) -> dict[str, torch.dtype]:
    """p, _to_copy(p, dtype=bfloat16) -> p of bfloat16, for parameters that are only used by such casts.

    Args:
        parameters: placeholder name -> name of the parameter.

    Returns:
        Name of each such parameter -> dtype in which it is stored.
    """
    dtype, stored = dtype_of(policy.param_dtype), {}
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in parameters or not _is_only_cast(node, dtype):
            continue
        for user in list(node.users):
            user.replace_all_uses_with(node)
            module.graph.erase_node(user)
        node.meta["val"] = torch.empty_like(value, dtype=dtype).requires_grad_(value.requires_grad)
        stored[parameters[node.name]] = value.dtype
    module.recompile()
    return stored


def _is_only_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    users = [user for user in node.users if user.target is not aten._assert_tensor_metadata.default]
    return bool(users) and all(
        user.target is aten._to_copy.default and user.kwargs.get("dtype") is dtype for user in users
    )
