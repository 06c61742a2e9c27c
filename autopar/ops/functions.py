"""`torch.ops.autopar.custom_function`, which stands for an application of an autograd.Function in a trace.

The op has no kernel: `autopar.capture.functions` puts the user's own code in its place when the trace is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import CaptureError


def _results(
    operands: Sequence[Tensor], ranks: Sequence[int], sizes: Sequence[int], dtypes: Sequence[str], *_: Any
) -> list[Tensor]:
    """Tensors without values, of the shapes that `ranks` cuts `sizes` into.

    The dtypes come as names, because torch 2.11 turns a list of dtypes into numbers.
    """
    remaining = iter(sizes)
    shapes = ([next(remaining) for _ in range(rank)] for rank in ranks)
    made = zip(shapes, dtypes, strict=True)
    return [operands[0].new_empty(shape, dtype=getattr(torch, name)) for shape, name in made]


class _StandIn(torch.autograd.Function):
    """Lets results require a gradient in the trace; nothing may ask for this gradient during the trace."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Any) -> tuple[Tensor, ...]:
        operands, others = given[:count], given[count:]
        ctx.name = others[3]
        with _torch.below_autograd():
            return tuple(torch.ops.autopar.custom_function.default(list(operands), *others))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise CaptureError(
            f"The forward computes a gradient through the torch.autograd.Function {ctx.name} "
            "(torch.autograd.grad), and the derivative of that gradient would be lost. Write the function "
            'with torch operators, or use torch.compile(model, backend="autopar").'
        )


def _with_autograd(operands: Sequence[Tensor], *others: Any) -> list[Tensor]:
    return list(_StandIn.apply(len(operands), *operands, *others))


def call(operands: Sequence[Tensor], results: Sequence[Tensor], name: str, number: int) -> list[Tensor]:
    """Adds an application to the trace that is being made.

    Args:
        operands: tensors that the function takes.
        results: tensors of the shapes and dtypes of its results.
        name: name of the function, for people.
        number: position of the application among those of this trace.
    """
    sizes = [int(size) for x in results for size in x.shape]
    dtypes = [str(x.dtype).removeprefix("torch.") for x in results]
    found: list[Tensor] = torch.ops.autopar.custom_function.default(
        list(operands), [x.ndim for x in results], sizes, dtypes, name, number
    )
    return found


def applications(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, int]]:
    """The calls that `call` has made, each with its number."""
    target = torch.ops.autopar.custom_function.default
    for node in graph.find_nodes(op="call_function", target=target):
        yield node, node.args[-1]


def register() -> torch.library.Library:
    """Defines the op; it lives as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    library.define(
        "custom_function(Tensor[] operands, int[] ranks, int[] sizes, str[] dtypes, str name, int number) -> Tensor[]"
    )
    library.impl("custom_function", _results, "Meta")
    library.impl("custom_function", _with_autograd, "Autograd")
    return library


LIBRARY = register()
