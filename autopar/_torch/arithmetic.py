"""Two other arithmetics for the operators that run inside a `with`: float64, and operators whose last bit is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar._torch import pytree

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a real floating type, complex128 for a complex one, and any other type itself."""
    return _WIDE.get(dtype, dtype)


def cast_in_any_arithmetic(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another format, also inside of an arithmetic that casts to wider ones."""
    with _disable_current_modes():
        return x.to(dtype)


class Float64Arithmetic(TorchDispatchMode):
    """Runs every operator in float64, forward and backward, also where the code asks for a lower precision.

    A cast to a lower floating type becomes a cast to float64. An operator that gets float64 together with a lower
    type gets float64 throughout, unless it writes to one of its arguments.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        names, values = tuple(kwargs or ()), [*args, *(kwargs or {}).values()]
        given = [_of_each(_widened_argument, value) for value in values]
        if _mixes(given) and not func._schema.is_mutable:
            given = [_of_each(_widened_tensor, value) for value in given]
        positional, named = given[: len(args)], zip(names, given[len(args) :], strict=True)
        result = _IN_FLOAT64.get(func, func)(*positional, **dict(named))
        return _widened_tensor(result) if func is torch.ops.aten.lift_fresh.default else result


def _grouped_mm(
    x: Tensor, y: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`aten._grouped_mm`, whose kernels take no float64, by its definition.

    Rows (or columns) `offs[e - 1]` to `offs[e]` belong to group e; those of no group give zero. Tensors without values
    give one of the right shape.
    """
    assert bias is None, "no kernel takes a bias"
    if offs is None:
        return torch.bmm(x, y)
    if isinstance(offs, FakeTensor):
        shape = [offs.numel()] if x.ndim == y.ndim == 2 else []
        return x.new_empty(*shape, x.shape[-2], y.shape[-1])
    ends = [0, *offs.tolist()]
    groups = [slice(a, b) for a, b in itertools.pairwise(ends)]
    if x.ndim == y.ndim == 2:
        return torch.stack([x[:, rows] @ y[rows] for rows in groups])
    result = x.new_zeros(x.shape[-2], y.shape[-1])
    for e, rows in enumerate(groups):
        if x.ndim == 2:
            result[rows] = x[rows] @ y[e]
        else:
            result[:, rows] = x[e] @ y[:, rows]
    return result


# Operators without a kernel for float64 -> the same in terms of others.
_IN_FLOAT64: Mapping[Any, Callable[..., Tensor]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


def _widened_argument(x: Any) -> Any:
    return widened_dtype(x) if isinstance(x, torch.dtype) else x


def _widened_tensor(x: Any) -> Any:
    return x.to(widened_dtype(x.dtype)) if isinstance(x, Tensor) else x


def _of_each(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to an operator's argument, which is one value or a list of values."""
    return [function(x) for x in value] if isinstance(value, (list, tuple)) else function(value)


def _mixes(given: Sequence[Any]) -> bool:
    flat = itertools.chain.from_iterable(x if isinstance(x, (list, tuple)) else (x,) for x in given)
    found = {x.dtype for x in flat if isinstance(x, Tensor)}
    return any(d in _WIDE for d in found) and bool(found & {torch.float64, torch.complex128})


class RandomLastBits(TorchDispatchMode):
    """Moves every entry of every operator's results by one unit in the last place, up, down or not, at random.

    This is Monte Carlo arithmetic (D. S. Parker, Monte Carlo Arithmetic, report CSD-970002, UCLA, 1997) at the
    precision of each tensor's own type: the results of runs inside it spread as rounding errors do. A result that is
    all integers (a mask, a count, a position) is exact and stays, and so does an entry that would become infinite.
    Views and operators that write to an argument are left alone. A result keeps its strides, since kernels go by them:
    group norm on CPU computes a variance of channels_last by a formula that loses more digits.

    Args:
        seed: seed of the draws.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **dict(kwargs or {}))
        if func._schema.is_mutable or func.is_view:
            return result
        return pytree.tree_map(self._moved, result)

    def _moved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
            return x
        if x.itemsize == 1 or torch.equal(x, x.round()):  # 8 bits are codes, which only dequantize computes with
            return x
        steps = torch.randint(-1, 2, x.shape, generator=self._generator).to(x.device, x.dtype)
        moved = x * (1 + torch.finfo(x.dtype).eps * steps)
        return torch.empty_like(x).copy_(torch.where(moved.isfinite(), moved, x))
