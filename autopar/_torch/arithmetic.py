"""Two other arithmetics for the operators that run inside a `with`: float64, and operators whose last bit is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

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
        given = pytree.tree_map(_widened_argument, (args, dict(kwargs or {})))
        if _mixes(given) and not func._schema.is_mutable:
            given = pytree.tree_map(_widened_tensor, given)
        result = func(*given[0], **given[1])
        return _widened_tensor(result) if func is torch.ops.aten.lift_fresh.default else result


def _widened_argument(x: Any) -> Any:
    return widened_dtype(x) if isinstance(x, torch.dtype) else x


def _widened_tensor(x: Any) -> Any:
    return x.to(widened_dtype(x.dtype)) if isinstance(x, Tensor) else x


def _mixes(given: Any) -> bool:
    found = {x.dtype for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}
    return any(d in _WIDE for d in found) and bool(found & {torch.float64, torch.complex128})


class RandomLastBits(TorchDispatchMode):
    """Moves every entry of every operator's results by one unit in the last place, up, down or not, at random.

    This is Monte Carlo arithmetic (D. S. Parker, Monte Carlo Arithmetic, report CSD-970002, UCLA, 1997) at the
    precision of each tensor's own type: the results of runs inside it spread as rounding errors do. Zeros and ones, of
    which masks are made, stay; so does an entry that would become infinite. Views and operators that write to an
    argument are left alone.

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
        steps = torch.randint(-1, 2, x.shape, generator=self._generator).to(x.device, x.dtype)
        moved = x * (1 + torch.finfo(x.dtype).eps * steps)
        return torch.where((x.abs() == 1) | ~moved.isfinite(), x, moved)
