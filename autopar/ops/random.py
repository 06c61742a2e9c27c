"""`torch.ops.autopar.keep_mask` and `draw`: random ops whose numbers come from a key.

See [Note: keys of random ops] in autopar/rules/random.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import OpOverload, schema


def keep_mask(x: Tensor, key: Tensor, p: float) -> Tensor:
    """A bool mask of the shape of `x`, False with probability `p`; it depends only on key and shape."""
    return torch.rand(x.shape, generator=_generator(key, x.device), device=x.device) >= p


def draw(
    op: str, operands: Sequence[Tensor], key: Tensor, scalars: Sequence[float], dtype: torch.dtype | None = None
) -> Tensor:
    """The result of `torch.ops.aten.<op>(...)` with a generator that the key seeds.

    Args:
        op: an overload that takes a generator, such as `bernoulli.p` or `rand_like.generator`.
        operands, scalars: its positional arguments, tensors and numbers, in their order.
        key: integer tensor of one element, which seeds the generator.
        dtype: element type of the result, for operators that take one.
    """
    function, arguments, types = drawn_call(op, operands, key, scalars, dtype)
    types["generator"] = _generator(key, operands[0].device)
    found: Tensor = function(*arguments, **types)
    return found


def drawn_call(
    op: str, operands: Sequence[Tensor], key: Tensor, scalars: Sequence[float], dtype: torch.dtype | None = None
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The overload that `draw` runs, with its arguments; the generator is the default one."""
    name, _, overload = op.partition(".")
    function: OpOverload = getattr(getattr(torch.ops.aten, name), overload)
    tensors, numbers = iter(operands), iter(scalars)
    arguments = tuple(
        next(tensors if isinstance(argument.type, torch.TensorType) else numbers)
        for argument in schema(function).arguments
        if argument.name != "generator" and not argument.kwarg_only
    )
    return function, arguments, {"generator": None} | ({} if dtype is None else {"dtype": dtype})


def _without_values(
    op: str, operands: Sequence[Tensor], key: Tensor, scalars: Sequence[float], dtype: torch.dtype | None = None
) -> Tensor:
    function, arguments, types = drawn_call(op, operands, key, scalars, dtype)
    found: Tensor = function(*arguments, **types)
    return found


def _generator(key: Tensor, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(int(key.item()))


def register() -> torch.library.Library:
    """Defines the ops; they live as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    library.define("keep_mask(Tensor x, Tensor key, float p) -> Tensor")
    library.impl("keep_mask", keep_mask, "CompositeExplicitAutograd")
    library.impl("keep_mask", lambda x, key, p: x.new_empty(x.shape, dtype=torch.bool), "Meta")
    library.define("draw(str op, Tensor[] operands, Tensor key, Scalar[] scalars, *, ScalarType? dtype=None) -> Tensor")
    library.impl("draw", draw, "CompositeExplicitAutograd")
    library.impl("draw", _without_values, "Meta")
    return library


LIBRARY = register()
