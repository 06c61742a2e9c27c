"""Tensors that are written into DTensors in place, though they do not lie as these: each rank takes its part of them.

`p.copy_(values)` and `p.add_(noise)` of a plain tensor are errors of torch ("got mixed torch.Tensor and DTensor"), but
scripts that load or change the weights of a layer write them. A plain tensor is the same on all ranks, so each can cut
its part without a message. A copy of a parameter that was made before the plan lies on another mesh than the parameter
does now: what a moving average adds to it is gathered, and in sums and products of both (slow weights, distances from
the first ones) it is cut as the parameter lies, as is a plain tensor of its shape. An operand that autograd follows is
left to torch, which refuses it: a gradient would not come back through the cut.

A DTensor that is written into a plain tensor is gathered: `average.lerp_(p, 0.1)` of a copy that every rank has whole,
by a method or by one of `torch._foreach_`. All ranks have to write it.

A row of a matrix that is split by rows, `p[0]`, is gathered and no longer a part of the matrix. torch 2.13 writes into
it as if it were, so that the write is lost; that is refused, here.

`p[0] = row` writes into a slice, and `p[mask] = 0` writes where a mask of the tensor's own shape is true. For other
indices torch mixes DTensors with plain tensors, so that they are refused, also on ranks without the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.distributed.dtensors import as_torch_does, handlers
from autopar._torch.distributed.elsewhere import is_elsewhere
from autopar._torch.distributed.gathered_operands import on_whole
from autopar._torch.distributed.owned import cut_like
from autopar._torch.distributed.stage_meshes import is_of_stage
from autopar._torch.pytree import tree_leaves, tree_map_only
from autopar.errors import StepError

_IN_PLACE = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_")
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_OF_TWO = (
    "add",
    "sub",
    "mul",
    "div",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
)
# Those that take no second tensor.
_OF_ONE = ("zero_", "fill_", "clamp_", "clip_", "pow_", "neg_", "normal_", "uniform_", "masked_fill_")

_aten = torch.ops.aten
_WRITES = (
    _aten.copy_.default,
    _aten.add_.Tensor,
    _aten.sub_.Tensor,
    _aten.mul_.Tensor,
    _aten.div_.Tensor,
    _aten.lerp_.Scalar,
    _aten.lerp_.Tensor,
    _aten._foreach_copy_.default,
    _aten._foreach_add_.List,
    _aten._foreach_sub_.List,
    _aten._foreach_mul_.List,
    _aten._foreach_lerp_.Scalar,
    _aten._foreach_lerp_.List,
)

_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor)


@functools.cache
def cut_whole_operands() -> None:
    """Makes in-place operators cut operands as the DTensor that they write, or gather them for a plain tensor."""
    handlers().update(dict.fromkeys(_WRITES, _write) | dict.fromkeys(_FILLS, _fill))
    for name in (*_IN_PLACE, *_OPERATORS, *_OF_ONE):
        setattr(DTensor, name, _with_parts(getattr(DTensor, name)))
    for name in _OF_TWO:
        setattr(DTensor, name, _on_one_mesh(getattr(DTensor, name)))
    DTensor.__setitem__ = _set_items  # type: ignore[method-assign, assignment]


def _write(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    into, *operands = args
    if isinstance(into, DTensor) and not is_elsewhere(into):  # also where a method was not called, as by proxies
        operands = [_part_of(operand, into) for operand in operands]
    given = [x for x in tree_leaves(operands) if isinstance(x, DTensor)]
    is_plain = not any(isinstance(x, DTensor) for x in tree_leaves(into))
    if not is_plain or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return as_torch_does(op, (into, *operands), kwargs)
    return op(into, *tree_map_only(DTensor, DTensor.full_tensor, operands), **kwargs)


def _fill(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Fills a DTensor. torch would fill each term of a partial sum, and so give a multiple of the value."""
    if any(placement.is_partial() for placement in args[0].placements):
        return on_whole(op, args, kwargs, args[:1])
    return as_torch_does(op, args, kwargs)


def _with_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def write(x: DTensor, *operands: Any, **options: Any) -> Any:
        if is_elsewhere(x):  # nothing is written
            return method(x, *operands, **options)
        _refuse_lost_write(x)
        return method(x, *(_part_of(operand, x) for operand in operands), **options)

    return write


def _on_one_mesh(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def combine(x: DTensor, other: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(other, Tensor) or x.shape != other.shape:
            return method(x, other, *args, **options)
        if not isinstance(other, DTensor):
            return method(x, _part_of(other, x), *args, **options)
        if x._spec.mesh != other._spec.mesh:
            if _is_whole_here(other):
                return method(x, cut_like(other._local_tensor, x), *args, **options)
            if _is_whole_here(x):
                return method(cut_like(x._local_tensor, other), other, *args, **options)
        return method(x, other, *args, **options)

    return combine


def _is_whole_here(x: DTensor) -> bool:
    """Whether every rank has the whole of a DTensor, of which autograd asks nothing."""
    is_followed = x.requires_grad and torch.is_grad_enabled()
    return not is_followed and not is_of_stage(x) and all(placement.is_replicate() for placement in x.placements)


def _set_items(x: DTensor, index: Any, value: Any) -> None:
    """`x[index] = value`. Raises StepError, on all ranks, for an index that is neither of slices nor a mask of all."""
    if isinstance(index, DTensor) and index.dtype is torch.bool and index.shape == x.shape:
        if isinstance(value, Tensor) and value.ndim:
            raise StepError(_not_by(index, x))
        x.masked_fill_(index, value)
        return
    if not all(each is None or each is ... or type(each) in (int, slice) for each in _indices(index)):
        raise StepError(_not_by(index, x))
    if isinstance(value, Tensor):
        x[index].copy_(value)
    else:
        x[index].fill_(value)


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _not_by(index: Any, x: DTensor) -> str:
    kinds = ", ".join(type(each).__name__ for each in _indices(index))
    return (
        f"x[index] = value was given an index of {kinds}, but x, of shape {list(x.shape)}, is a DTensor, into which "
        "slices and masks of its own shape (x[x < 0] = 0) are written. Write the whole on all ranks: whole = "
        "x.detach().full_tensor(); whole[index] = value; x.copy_(whole), under torch.no_grad()."
    )


def _refuse_lost_write(x: DTensor) -> None:
    """Raises StepError for a view of a DTensor that was gathered, and so does not share its memory."""
    base: Any = None if torch.compiler.is_compiling() else x._base
    if not isinstance(base, DTensor):
        return
    mine, other = x._local_tensor.untyped_storage(), base._local_tensor.untyped_storage()
    if mine.data_ptr() != other.data_ptr():
        raise StepError(
            f"A slice of shape {list(x.shape)} is written in place, but the tensor of shape {list(base.shape)} lies as "
            f"{list(base.placements)}, so that this slice is a copy and the write would be lost. Write the whole on "
            "all ranks: whole = p.detach().full_tensor(); whole[0].add_(1); p.copy_(whole), under torch.no_grad()."
        )


def _part_of(operand: Any, x: DTensor) -> Any:
    """This rank's part of a plain tensor, or of a DTensor on another mesh, made as large as `x`; else as it is."""
    if not isinstance(operand, Tensor) or operand.ndim == 0 or (operand.requires_grad and torch.is_grad_enabled()):
        return operand
    if isinstance(operand, DTensor):
        if operand._spec.mesh == x._spec.mesh or (is_elsewhere(operand) and is_of_stage(x)):
            return operand
        operand = operand.full_tensor()
    return cut_like(operand.expand(x.shape), x)
