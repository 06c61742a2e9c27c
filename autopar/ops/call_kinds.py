"""Keys of calls, from the op, its plain arguments and the kinds of its operands: equal keys have equal examples."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar._torch import FakeTensor


def writes_nothing(target: Any) -> bool:
    """Whether an op is one of torch's own that writes to nothing, so that it depends on nothing but its operands."""
    if target is operator.getitem:
        return True
    return isinstance(target, _torch.OpOverload) and target.namespace == "aten" and not _torch.schema(target).is_mutable


def arguments_of(node: fx.Node) -> tuple[Hashable, list[fx.Node]]:
    """The plain arguments of a call, and its operands in order. Raises TypeError for open sizes."""
    operands: list[fx.Node] = []
    return tuple(_plain((node.args, dict(node.kwargs)), operands)), operands


def _plain(x: Any, operands: list[fx.Node]) -> Iterator[Hashable]:
    """The parts of an argument with their types; its nodes are added to `operands`."""
    if isinstance(x, fx.Node):
        operands.append(x)
        yield fx.Node
    elif isinstance(x, dict):
        yield tuple(x)
        yield from _plain(tuple(x.values()), operands)
    elif isinstance(x, slice):
        yield from _plain((x.start, x.stop, x.step), operands)
    elif isinstance(x, list | tuple):
        yield len(x)
        for value in x:
            yield from _plain(value, operands)
    elif isinstance(x, _torch.SYMBOLIC):
        raise TypeError("an open size")
    else:
        yield type(x), repr(x) if isinstance(x, float | complex) else x


def kind_of(node: fx.Node) -> Hashable:
    """A key of everything that an op can know of a node's example; None without one, as for an assertion.

    Raises TypeError for what is not a tensor of fixed sizes.
    """
    value = node.meta.get("val")
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    return _kind_of(value)


def _kind_of(x: Any) -> Hashable:
    if type(x) is not FakeTensor or x.layout is not torch.strided or x.constant is not None:
        raise TypeError(f"{x!r} is not a tensor of which only sizes and strides are known")
    sizes = (*x.shape, *x.stride(), x.storage_offset())
    if not all(type(size) is int for size in sizes):
        raise TypeError("an open size")
    return (x.fake_mode, x.dtype, x.device, x.requires_grad, x.ndim, sizes, x.is_conj(), x.is_neg(), x.is_inference())


def is_like(one: fx.Node, other: fx.Node) -> bool:
    """Whether the examples of two nodes are of one kind."""
    try:
        return kind_of(one) == kind_of(other)
    except TypeError:
        return False
