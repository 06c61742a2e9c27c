"""Rebuilds an autograd.Function from the graphs of its forward and backward that dynamo has traced."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx


def function_of(
    forward: fx.GraphModule, backward: fx.GraphModule, name: str, non_differentiable: Collection[int]
) -> type[torch.autograd.Function]:
    """Makes an autograd.Function from the two graphs of dynamo's operator `autograd_function_apply`.

    That operator runs once, and keeps what it saves outside `ctx`. This class may run for any number of micro-batches
    before their backwards.

    Args:
        forward: takes the operands, and returns the results and what is saved.
        backward: takes the gradients of the results and what was saved.
        name: name of the class.
        non_differentiable: positions of the results that require no gradient.
    """

    def run_forward(ctx: Any, *operands: Any) -> tuple[Any, ...]:
        results, saved = _run(forward, *operands)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))
        ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.mark_non_differentiable(*(results[i] for i in non_differentiable))
        return tuple(results)

    def run_backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        return _run(backward, *gradients, *(other if x is None else x for x, other in pairs))

    members = {
        "forward": staticmethod(run_forward),
        "backward": staticmethod(run_backward),
        "__module__": "dynamo",
        "traced_code": forward.code + backward.code,  # equal where functions do the same
    }
    return type(name, (torch.autograd.Function,), members)


def _run(graph: fx.GraphModule, *arguments: Any) -> Any:
    """Runs a graph, which may leave autograd on or off."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return fx.Interpreter(graph).run(*arguments)
