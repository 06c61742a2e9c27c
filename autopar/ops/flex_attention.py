"""Attention with a function of every score as an op: `torch.nn.attention.flex_attention` as text in a graph.

    flex_attention(query, key, value, tensors, mask, score, scale) -> (result, logsumexp)

`mask` and `score` are mask_mod and score_mod as `autopar.ops.point_program` writes them, "" for none; both read
`tensors`. On an accelerator torch's flex_attention runs, compiled, on a block mask of the program. Elsewhere torch has
no backward of it, and the scores of runs of queries are computed one after the other, in forward and again in backward.
`score_point` makes the scalars with which a function is traced; `untraced_blocks` stands for the blocks of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.ops.attention_block import wide
from autopar.ops.point_program import PointProgram, over_all, read_program

_NAME = "flex_attention"
# Size of the scores that are in memory at the same time.
_SCORES_BYTES = 2**26


def _results(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Tensors without values, of the shapes and formats of the results."""
    result = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return result, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def _of_run(
    first: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    mask: str,
    score: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of a run of queries, as torch's own definition computes them."""
    dtype = wide(query.dtype)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    starts = zip((0, 0, first, 0), scores.shape, strict=True)
    indices = [torch.arange(at, at + size, device=query.device) for at, size in starts]
    if score:
        scores = over_all(read_program(score), scores, indices, tensors)
    if mask:
        seen = over_all(read_program(mask), None, indices, tensors)
        scores = scores.masked_fill(~seen, float("-inf"))
    hidden = (scores == float("-inf")).all(-1)
    # Backward of a row of -inf alone would be NaN.
    logsumexp = scores.masked_fill(hidden.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(hidden, float("-inf"))
    weights = torch.exp(scores - logsumexp.masked_fill(hidden, 0.0).unsqueeze(-1))
    return (weights.to(query.dtype) @ value).to(query.dtype), logsumexp


def _runs(query: Tensor, key: Tensor) -> Iterator[tuple[int, int]]:
    """First query and number of queries of the runs whose scores are in memory together."""
    row = query.shape[:2].numel() * key.shape[-2] * wide(query.dtype).itemsize
    step = max(1, _SCORES_BYTES // max(1, row))
    return ((first, min(step, query.shape[-2] - first)) for first in range(0, query.shape[-2], step))


def _forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    parts = [_of_run(first, query.narrow(2, first, size), *rest) for first, size in _runs(query, rest[0])]
    results, sums = zip(*parts, strict=True)
    return torch.cat(results, 2), torch.cat(sums, 2)


def _backward(
    gradient: Tensor,
    of_sum: Tensor,
    wanted: list[bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    """Gradients of query, key, value and tensors; empty tensors where they are not wanted."""
    operands = (query, key, value, *tensors)
    sums = [torch.zeros_like(x) if want else x.new_empty(0) for x, want in zip(operands, wanted, strict=True)]
    for first, size in _runs(query, key):
        own = [x.detach().requires_grad_(want) for x, want in zip(operands, wanted, strict=True)]
        with torch.enable_grad():
            found = _of_run(first, own[0].narrow(2, first, size), own[1], own[2], own[3:], *rest)
        ends = [x.narrow(2, first, size) for x in (gradient, of_sum)]
        starts = [x for x in own if x.requires_grad]
        given = iter(torch.autograd.grad(found, starts, ends, allow_unused=True))
        for total, want in zip(sums, wanted, strict=True):
            if want and (part := next(given)) is not None:
                total += part
    return sums


class _FlexAttention(torch.autograd.Function):
    """The op where its backward is `flex_attention_backward`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ctx.count = len(args) - 3
        operands, ctx.rest = args[: ctx.count], args[ctx.count :]
        ctx.save_for_backward(*operands)
        with _torch.below_autograd():
            found: tuple[Tensor, Tensor] = _torch.autopar_op(_NAME)(*operands[:3], list(operands[3:]), *ctx.rest)
        return found

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[: ctx.count])
        query, key, value, *tensors = ctx.saved_tensors
        call = _torch.autopar_op(_NAME + "_backward")
        found = call(gradient, of_sum, wanted, query, key, value, tensors, *ctx.rest)
        return *(x if want else None for x, want in zip(found, wanted, strict=True)), None, None, None


def _with_autograd(query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], *rest: Any) -> Any:
    if query.device.type in _torch.FLEX_DEVICES and _torch.has_values(query) and query.numel():
        return _on_accelerator(query, key, value, tensors, *rest)
    return _FlexAttention.apply(query, key, value, *tensors, *rest)


def _on_accelerator(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], mask: str, score: str, scale: float
) -> tuple[Tensor, Tensor]:
    mask_function = _function(read_program(mask), tensors) if mask else None
    score_function = _function(read_program(score), tensors) if score else None
    return _torch.flex_attention(query, key, value, mask_function, score_function, scale)


def _function(program: PointProgram, tensors: Sequence[Tensor]) -> Any:
    def function(*scalars: Tensor) -> Tensor:
        return program(*scalars, *tensors)

    return function


def _point(query: Tensor) -> list[Tensor]:
    """A score, and indices of batch, head, query and key, as scalars of a trace."""
    return [query.new_zeros((), dtype=wide(query.dtype)), *(query.new_zeros((), dtype=torch.int64) for _ in range(4))]


def register() -> torch.library.Library:
    """Defines the ops, which exist as long as the returned library."""
    library = torch.library.Library("autopar", "FRAGMENT")
    operands, rest = "Tensor query, Tensor key, Tensor value, Tensor[] tensors", "str mask, str score, float scale"
    library.define(f"{_NAME}({operands}, {rest}) -> (Tensor, Tensor)")
    library.impl(_NAME, _forward, "CompositeExplicitAutograd")
    library.impl(_NAME, _with_autograd, "Autograd")
    library.impl(_NAME, _results, "Meta")
    name, given = _NAME + "_backward", "Tensor gradient, Tensor of_sum, bool[] wanted"
    library.define(f"{name}({given}, {operands}, {rest}) -> Tensor[]")
    library.impl(name, _backward, "CompositeExplicitAutograd")
    library.impl(name, _shapes, "Meta")
    library.define("score_point(Tensor query) -> Tensor[]")
    library.impl("score_point", _point, "CompositeExplicitAutograd")
    library.impl("score_point", _point, "Meta")
    library.define("untraced_blocks(Tensor like, SymInt[] shape) -> Tensor")
    library.impl("untraced_blocks", lambda like, shape: like.new_empty(shape), "Meta")
    return library


def _shapes(
    gradient: Tensor,
    of_sum: Tensor,
    wanted: list[bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    operands = (query, key, value, *tensors)
    return [x.new_empty(x.shape if want else (0,)) for x, want in zip(operands, wanted, strict=True)]


LIBRARY = register()
