"""Runs the examples again, so that they have the strides which the cleaned graph gives them.

Strides decide whether a reshape copies, and so which tensors autograd saves. After a pass has removed a copy, the
example tensors of later nodes still have the strides that the copy gave. On the meta device, attention returns the
strides of its decomposition; fused kernels on accelerators return another order, (batch, row, head).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import DependsOnValues, keeping_sizes_open
from autopar.capture.remedies import traced_line, uncaptured
from autopar.ops.call_kinds import arguments_of, kind_of, writes_nothing
from autopar.ops.nodes import tensor_operands

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def refresh_examples(module: fx.GraphModule) -> None:
    """Runs every call on the example tensors of its operands, and stores the result as its example (`meta["val"]`).

    A call keeps its old example if the new one would have another shape, or if the call depends on values that example
    tensors do not have. Calls without tensor operands (factories) are not run. On the meta device the result of
    attention gets the strides that fused kernels give it.

    Raises CaptureError for a call that fails, with its line in the model's code.
    """
    known: dict[Hashable, Any] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or not _is_tensors(node) or not _has_tensors(node):
            continue
        kind = _kind(node)
        if kind is None or kind not in known:
            value = _result(node)
            known |= {} if kind is None else {kind: value}
        else:
            value = known[kind]
        if value is not None and _shapes(value) == _shapes(node.meta["val"]):
            node.meta["val"] = value


def _kind(node: fx.Node) -> Hashable:
    """A key that is equal for calls with the same result, such as those of equal layers; None if there is no key."""
    if not writes_nothing(node.target):
        return None
    try:
        arguments, operands = arguments_of(node)
        kind = node.target, arguments, tuple(map(kind_of, operands))
        hash(kind)
    except TypeError:
        return None
    return kind


def _result(node: fx.Node) -> Any:
    """The result of a call on the examples of its operands; None where it depends on values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    operator: Any = node.target
    try:
        with keeping_sizes_open([x.meta["val"] for x in tensor_operands(node)]):
            value = operator(*args, **kwargs)
    except DependsOnValues:  # istft looks whether its window is zero anywhere
        return None
    except Exception as error:  # such as an op that has no derivative for what it is given
        raise uncaptured(traced_line(node), f"{node.target}: {error}", "Write this line with other ops") from error
    if node.target is _ATTENTION and value.device.type == "meta" and value.ndim == 4:
        value = value.transpose(1, 2).contiguous().transpose(1, 2)
    return value


def _has_tensors(node: fx.Node) -> bool:
    """Factories are left out: outside of capture they would make real tensors."""
    return bool(tensor_operands(node)) or getattr(node.target, "__name__", "") == "getitem"


def _is_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return all(isinstance(x, Tensor) for x in (value if isinstance(value, (list, tuple)) else [value]))


def _shapes(value: Tensor | tuple[Tensor, ...]) -> list[torch.Size]:
    return [x.shape for x in ([value] if isinstance(value, Tensor) else value)]
