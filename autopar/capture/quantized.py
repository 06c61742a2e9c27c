"""Weights that are tensors of other tensors, such as codes of four bits with a scale for each block of them.

The weights of a quantized base stay frozen beside adapters that are trained. Each is a subclass of Tensor whose
`__tensor_flatten__` names its inner tensors, and which `dequantize` turns into numbers. Here the inner tensors become
parameters of the model in its place, by torch's parametrization, and the model's code reads

    layer.weight  ->  dequantize(layer.parametrizations.weight.original0, ...original1)

So a graph has the codes and the scales as parameters. They are stored, split and gathered as they are; along which
dims, the rules of the ops of `dequantize` say: rows of codes and scales together, columns where no block is cut.

That is the subclass only if its own product is the product with its numbers, which is tried on random ones: one that
rounds what it is multiplied with, too, is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autopar import _torch
from autopar.errors import CaptureError
from autopar.rules.proofs import tolerance


@dataclass(frozen=True)
class _Made:
    """How a tensor is made of others.

    Attributes:
        kind: the subclass.
        parts: name of an inner tensor -> how it is made; the format of a plain one.
        context: what `__tensor_flatten__` says beside the names.
        size, stride: shape and strides of the tensor.
    """

    kind: Any
    parts: Mapping[str, _Made | torch.dtype]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Any) -> _Made:
        names, context = x.__tensor_flatten__()
        parts = {
            name: cls.of(y) if is_quantized(y) else y.dtype for name in names if (y := getattr(x, name)) is not None
        }
        return cls(type(x), parts, context, x.size(), x.stride())

    def taken_apart(self, x: Any) -> list[Tensor]:
        """The plain tensors of which a tensor is made."""
        inner = [(getattr(x, name), how) for name, how in self.parts.items()]
        return [z for y, how in inner for z in (how.taken_apart(y) if isinstance(how, _Made) else [y.detach()])]

    def together(self, tensors: Iterator[Tensor]) -> Any:
        """The tensor that is made of plain ones, which a proof may give in a wider format than a constructor takes."""
        parts = self.parts.items()
        inner = {name: how.together(tensors) if isinstance(how, _Made) else next(tensors) for name, how in parts}
        formats = {name: how for name, how in parts if isinstance(how, torch.dtype) and inner[name].dtype != how}
        stored = {name: _torch.cast_in_any_arithmetic(inner[name], dtype) for name, dtype in formats.items()}
        found = self.kind.__tensor_unflatten__(inner | stored, self.context, self.size, self.stride)
        for name in formats:
            setattr(found, name, inner[name])
        return found


class _Dequantized(nn.Module):
    """The parametrization of a weight by its inner tensors."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.made, self.dtype = _Made.of(weight), weight.dtype

    def forward(self, *tensors: Tensor) -> Tensor:
        found: Tensor = self.made.together(iter(tensors)).dequantize()
        return found.to(self.dtype)

    def right_inverse(self, weight: Any) -> list[Tensor]:
        return self.made.taken_apart(weight)


def is_quantized(x: object) -> bool:
    """Whether a tensor is made of others, and gives its numbers when it is asked."""
    return isinstance(x, Tensor) and hasattr(x, "__tensor_flatten__") and hasattr(x, "dequantize") and _is_own(x)


def _is_own(x: Tensor) -> bool:
    return type(x).dequantize is not Tensor.dequantize


def store_inner_tensors(model: nn.Module) -> list[nn.Module]:
    """Puts the inner tensors of quantized weights into the model as parameters; returns the modules that have some.

    Raises CaptureError, and changes nothing, for a weight that takes a gradient, or whose product is not that with its
    numbers.
    """
    found = [
        (path, module, name, weight)
        for path, module in model.named_modules()
        for name, weight in module._parameters.items()
        if weight is not None and is_quantized(weight)
    ]
    for path, _, name, weight in found:
        _check(f"{path}.{name}".lstrip("."), weight)
    for _, module, name, weight in found:
        parametrize.register_parametrization(module, name, _Dequantized(weight))
        for x in module.parametrizations[name].parameters():
            x.requires_grad_(False)
    return [module for _, module, *_ in found]


@contextlib.contextmanager
def inner_tensors_stored(model: nn.Module) -> Iterator[None]:
    """Context in which a model has the inner tensors of its quantized weights as parameters."""
    kept = {module: (type(module), dict(module._parameters)) for module in model.modules()}
    found = store_inner_tensors(model)
    try:
        yield
    finally:
        for module in found:
            module._modules.pop("parametrizations", None)
            module.__class__, module._parameters = kept[module]


def _check(name: str, weight: nn.Parameter) -> None:
    kind = type(weight).__name__
    if weight.requires_grad:
        raise CaptureError(
            f"The weight {name} is quantized ({kind}) and takes a gradient, which its codes cannot have. Freeze it, "
            "requires_grad_(False), and train adapters beside it."
        )
    rounds = getattr(weight, "act_quant_kwargs", None) is not None
    if not rounds and weight.ndim == 2 and weight.device.type != "meta":
        rounds = not _multiplies(weight)
    if rounds:
        raise CaptureError(
            f"The weight {name} is quantized ({kind}), and its product is not the product with weight.dequantize(): "
            "it rounds what it is multiplied with, too. Quantize weights alone, such as by Int8WeightOnlyConfig of "
            "torchao."
        )


def _multiplies(weight: Tensor) -> bool:
    """Whether a product with a weight is that with its numbers, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[1], dtype=torch.float64, generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            own = F.linear(x, weight)
        except (RuntimeError, NotImplementedError, TypeError):
            return True  # it multiplies only on another device, or is no weight of a product
        gap = (own - F.linear(x, weight.dequantize())).abs().max() / own.abs().max().clamp(min=1e-30)
    return float(gap) <= tolerance([weight.dtype])
