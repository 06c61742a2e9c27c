"""Replaces products of linear layers by float8 ones while a model is called.

A call of `torch.nn.functional.linear` with a parameter of the model, as `nn.Linear` makes it, becomes the op
`autopar::float8_linear` where both dims of the weight are multiples of a tile. The bias is added to its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import _torch
from autopar.errors import CaptureError
from autopar.ir import MixedPrecision
from autopar.ops.float8 import TILE


@contextmanager
def rounded_products(model: nn.Module, parameters: Mapping[str, Tensor], policy: MixedPrecision) -> Iterator[None]:
    """Context in which linear layers of a model round their operands, as the policy says.

    Args:
        model: the model that is called.
        parameters: tensors that stand for the model's parameters, by name.
        policy: mixed-precision policy, of which `product_dtype` and `exempt` are used.

    Raises:
        CaptureError: if no product was rounded, or a name in `exempt` matches no linear layer.
    """
    if policy.product_dtype is None:
        yield
        return
    _check_names(model, policy)
    mode = _Rounding(_layers(model, parameters), policy)
    with mode:
        yield
    if not mode.rounded:
        raise CaptureError(
            f"precision={str(policy)!r} rounds the products of linear layers, but none was rounded: "
            f"{_seen(mode)}. A layer is rounded if it calls torch.nn.functional.linear with its own weight, as "
            "nn.Linear does (nn.MultiheadAttention does not), on an input of two dims or more; if both dims of that "
            f"weight are multiples of {TILE}; and if it is not exempt."
        )


def _layers(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """The names of the modules that have a parameter, by the identity of the tensor that stands for it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    every = {first: names[id(model.get_parameter(first))] for first in parameters}
    return {id(x): [name.rpartition(".")[0] for name in every[first]] for first, x in parameters.items()}


def _seen(mode: _Rounding) -> str:
    if not mode.left:
        return "the model calls no linear layer"
    name, shape = next(iter(mode.left.items()))
    return f"of {len(mode.left)} linear layers the first is {name!r} with a weight of shape {shape}"


def _check_names(model: nn.Module, policy: MixedPrecision) -> None:
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    for pattern in policy.exempt:
        if not any(_covers(pattern, name) for name in linear):
            shown = ", ".join(linear[:6]) + ", ..." * (len(linear) > 6)
            raise CaptureError(
                f"The precision exempts {pattern!r}, which no linear layer is called; there are {shown or 'none'}."
            )


def _covers(pattern: str, name: str) -> bool:
    """Whether a pattern matches the name of a layer or of a module around it.

    >>> _covers("blocks.0", "blocks.0.up"), _covers("head", "heads")
    (True, False)
    """
    words = name.split(".")
    return any(fnmatchcase(".".join(words[:i]), pattern) for i in range(1, len(words) + 1))


class _Rounding(TorchFunctionMode):
    """Replaces calls of linear layers.

    Attributes:
        rounded: names of the layers that were rounded.
        left: names of the other layers, with the shapes of their weights.

    Args:
        layers: names of the layers that have a parameter, by its identity.
        policy: the policy, whose `exempt` names layers that are left.
    """

    def __init__(self, layers: Mapping[int, list[str]], policy: MixedPrecision) -> None:
        super().__init__()
        self._layers, self._policy = layers, policy
        self.rounded: set[str] = set()
        self.left: dict[str, list[int]] = {}

    def __torch_function__(self, function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.linear:
            return function(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        names = self._layers.get(id(weight), [])
        if not names or not self._is_rounded(names, input, weight):
            self.left |= {name: list(weight.shape) for name in names[:1]}
            return F.linear(input, weight, bias)
        if (dtype := _torch.autocast_dtype(input.device)) is not None:
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if input.dtype is not weight.dtype:
            return F.linear(input, weight, bias)  # which says so
        self.rounded.update(names)
        result: Tensor = _torch.autopar_op("float8_linear")(input, weight)
        return result if bias is None else result + bias

    def _is_rounded(self, names: list[str], input: Tensor, weight: Tensor) -> bool:
        whole_tiles = weight.ndim == 2 and not any(size % TILE for size in weight.shape)
        return (
            input.ndim > 1
            and whole_tiles
            and not any(_covers(pattern, x) for pattern in self._policy.exempt for x in names)
        )
