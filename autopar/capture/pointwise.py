"""Finds the dims along which a function of tensors is point-wise, by tracing it at several sizes.

The function and its backward are traced to ATen ops. It is point-wise along a dim if

    every op is one that PyTorch or the rules know to be point-wise, on tensors of one shape and single elements;
    the same ops with the same numbers are traced when the dim has another size, as in `gradient / len(x)` they
    are not.

A dim that these traces do not show to be point-wise is not split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar._torch import OpOverload
from autopar.rules.elementwise import RULES as POINTWISE

aten = torch.ops.aten
Run = Callable[..., Sequence[Tensor]]
# They move no element if the shape stays the same, and otherwise repeat one number everywhere.
_STILL = frozenset(
    (
        aten.view,
        aten._unsafe_view,
        aten.reshape,
        aten.expand,
        aten.zeros,
        aten.ones,
        aten.full,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
    )
)


def free_dims(run: Run, operands: Sequence[Tensor], results: Sequence[Tensor]) -> frozenset[int]:
    """The dims along which a function and its backward are point-wise; the last dim is 0, the one before it 1.

    There is none if a tensor of more than one element has another shape than the first result.

    Args:
        run: function, which is only traced, on tensors of several sizes.
        operands: tensors with the shapes and dtypes of its arguments; their values are not read.
        results: tensors with the shapes and dtypes of its results for these.
    """
    shape = results[0].shape
    if any(x.shape != shape and x.numel() != 1 for x in (*operands, *results)):
        return frozenset()
    whole = _ops(run, operands, shape)
    if whole is None:
        return frozenset()
    return frozenset(
        len(shape) - 1 - dim
        for dim, size in enumerate(shape)
        if size > 1 and all(_ops(run, operands, _resized(shape, dim, n)) == whole for n in _other_sizes(size))
    )


def _other_sizes(size: int) -> tuple[int, ...]:
    """The sizes of the largest and smallest parts into which a dim can be cut."""
    return size // next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size), 1


def _resized(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([size if d == dim else n for d, n in enumerate(shape)])


def _ops(run: Run, operands: Sequence[Tensor], shape: torch.Size) -> list[Any] | None:
    """A line for every op of forward and backward on tensors of a shape; None if an op is not point-wise."""
    sized = [torch.empty(shape if x.numel() != 1 else x.shape, dtype=x.dtype, device=x.device) for x in operands]
    differentiable = [i for i, x in enumerate(operands) if x.requires_grad]

    def with_gradients(*given: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(i in differentiable) for i, x in enumerate(given)]
        made = run(*leaves)
        ends = [y for y in made if y.requires_grad]
        wanted = [leaves[i] for i in differentiable]
        if not ends or not wanted:
            return list(made)
        ones = [torch.zeros_like(y) for y in ends]
        found = torch.autograd.grad(ends, wanted, ones, allow_unused=True)
        return [*made, *(x for x in found if x is not None)]

    try:
        graph = _torch.traced_ops(with_gradients, sized)
    except Exception:  # of this size the function does not run
        return None
    found = list(_described(graph, shape))
    return None if None in found else found


def _described(graph: fx.Graph, shape: torch.Size) -> Iterator[Any]:
    """A line for every call, None for one that is not point-wise."""
    names: dict[fx.Node, int] = {}
    for node in graph.nodes:
        names[node] = len(names)
        value = node.meta.get("val")
        if node.op != "call_function":
            yield node.op, fx.map_arg(node.args, names.__getitem__)
            continue
        sized = isinstance(value, Tensor) and (value.shape == shape or value.numel() == 1)
        yield _line(node, names, shape) if sized else None


def _line(node: fx.Node, names: dict[fx.Node, int], shape: torch.Size) -> Any:
    packet, tags = getattr(node.target, "overloadpacket", None), getattr(node.target, "tags", ())
    inputs = [x.meta["val"].shape for x in node.all_input_nodes]
    if packet in _STILL:
        moved = [x for x in inputs if x != node.meta["val"].shape]
        numbers = [x for x in node.args if isinstance(x, (bool, int, float))]
        return None if moved else (str(packet), [names[x] for x in node.all_input_nodes], numbers)
    is_pointwise = torch.Tag.pointwise in tags or str(packet) in POINTWISE
    if not isinstance(node.target, OpOverload) or not is_pointwise:
        return None
    if torch.Tag.nondeterministic_seeded in tags or (not inputs and node.meta["val"].shape == shape):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: f"%{names[x]}")
    return str(node.target), args, sorted(kwargs.items(), key=str)
