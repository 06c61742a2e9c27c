"""Fused attention that returns the log-sum-exp of every query, and its backward.

torch.distributed.tensor.experimental.context_parallel runs the same kernels, of CUDA alone, on DTensors of one axis
without masks. There is no public call of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from autopar._torch.contexts import replaced

aten = torch.ops.aten


def has_fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether `fused_attention` and its backward accept these tensors, of shape (batch, heads, rows, width).

    They do on a processor; and on CUDA in half precision, without a bias. Keys and values have one width. The query may
    have several times as many heads.
    """
    tensors = (query, key, value)
    is_known = all(x.ndim == 4 and x.stride(-1) == 1 for x in tensors)
    if not is_known or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return False
    return query.device.type == "cpu" or (bias is None and _takes_flash_attention(query))


def _takes_flash_attention(query: Tensor) -> bool:
    """Whether CUDA has a kernel for the query's number format and width (sdp_utils of PyTorch 2.13)."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    return query.device.type == "cuda" and is_half and width % 8 == 0 and width <= 256


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of the scores of every query, of shape (batch, heads, rows).

    For a query of which the bias hides all keys the result is 0, and the log-sum-exp negative infinity.

    Args:
        query, key, value: the operands.
        bias: addend of the scores, in the number format of the query; negative infinity hides a key.
        is_causal: whether query i sees no key behind key i; there are then as many queries as keys.
        scale: factor of the scores, before the bias is added.
    """
    if query.device.type != "cpu":
        result, logsumexp, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return result, logsumexp
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if bias is not None:  # the kernel gives 0 where nothing is seen
        logsumexp = logsumexp.masked_fill(bias.amax(-1) == float("-inf"), float("-inf"))
    return result, logsumexp


def fused_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    result: Tensor,
    logsumexp: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    Args:
        gradient: gradient of the result.
        query, key, value, bias, is_causal, scale: as in the forward; keys may be some of those that queries have seen.
        result: result of the queries over all keys that they have seen.
        logsumexp: log-sum-exp of the scores of every query over all these keys.
    """
    if query.device.type != "cpu":
        lengths, drawn = (None, None, query.shape[-2], key.shape[-2]), (None, None)  # for dropout
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, result, logsumexp, *lengths, 0.0, is_causal, *drawn, scale=scale
        )
    finite = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, result, finite, 0.0, is_causal, attn_mask=bias, scale=scale
    )


FLEX_DEVICES = ("cuda", "xpu")  # where torch's flex_attention has a backward


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Callable[..., Tensor] | None,
    score: Callable[..., Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result of torch's flex_attention, compiled on an accelerator, and the log-sum-exp of every query's scores.

    Args:
        query, key, value: tensors of shape (batch, heads, rows, width).
        mask, score: mask_mod and score_mod; None for none.
        scale: factor of the scores.
    """
    call, make = flex.flex_attention, flex.create_block_mask
    if query.device.type in FLEX_DEVICES:
        call, make = _compiled_flex()
    blocks = None
    if mask is not None:
        batch, heads, rows = query.shape[:3]
        blocks = make(mask, batch, heads, rows, key.shape[2], device=query.device)
    grouped = query.shape[1] != key.shape[1]
    result, aux = call(
        query, key, value, score, blocks, scale, enable_gqa=grouped, return_aux=flex.AuxRequest(lse=True)
    )
    assert aux.lse is not None, "it was asked for"
    return result, aux.lse


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.compile(flex.flex_attention, dynamic=False), torch.compile(flex.create_block_mask, dynamic=False)


def blocks_agree(mask: Any) -> bool:
    """Whether the blocks of a block mask, which have values, are those that its function gives."""
    batch, heads, queries, keys = mask.shape
    dense = flex.create_mask(mask.mask_mod, batch, heads, queries, keys, mask.kv_num_blocks.device)
    rows, columns = mask.BLOCK_SIZE
    missing = (-dense.shape[-1] % columns, -dense.shape[-2] % rows)
    tiles = torch.nn.functional.pad(dense, (0, missing[0], 0, missing[1])).unflatten(-1, (-1, columns))
    counts = tiles.unflatten(-3, (-1, rows)).sum((-1, -3))  # of what is seen in each block
    if not torch.equal(mask.to_dense().bool(), counts > 0):
        return False
    if mask.full_kv_num_blocks is None:
        return True
    full = block_mask(mask.mask_mod, mask.full_kv_indices, mask.full_kv_num_blocks, mask.seq_lengths, mask.BLOCK_SIZE)
    return bool((counts == rows * columns)[full.to_dense().bool()].all())


def block_mask(mask: Callable[..., Tensor], blocks: Tensor, counts: Tensor, lengths: tuple[int, int], size: Any) -> Any:
    """A block mask of torch.

    Args:
        mask: its mask_mod.
        blocks: indices of the blocks of keys, of shape (batch, heads, blocks of queries, blocks of keys).
        counts: numbers of these blocks for every block of queries.
        lengths: numbers of queries and keys.
        size: queries and keys of a block.
    """
    return flex.BlockMask(lengths, counts, blocks, None, None, None, None, None, None, size, mask)


@contextlib.contextmanager
def flex_attention_by(attend: Callable[..., Any], make: Callable[..., Any]) -> Iterator[None]:
    """Context in which other functions run in the place of two of torch's, also through names bound before.

    Args:
        attend: function that is called for flex_attention.
        make: function that is called for create_block_mask.
    """
    with (
        _code_of(flex.flex_attention, _handed_to_attend),
        _code_of(flex.create_block_mask, _handed_to_make),
        replaced(flex, _autopar_attend=attend, _autopar_make=make),
    ):
        yield


@contextlib.contextmanager
def flex_attention_by_definition() -> Iterator[None]:
    """Context in which flex_attention on a processor is torch's definition of it, which has a backward.

    Compiled functions run as they are written.
    """
    with (
        _code_of(flex.flex_attention, _handed_to_attend) as call,
        torch.compiler.set_stance("force_eager"),
        replaced(flex, _autopar_attend=functools.partial(_attend_by_definition, call)),
    ):
        yield


def _attend_by_definition(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(call).bind(*args, **kwargs)
    given.apply_defaults()
    query, key, value, score, mask, scale = list(given.arguments.values())[:6]
    if query.device.type != "cpu":
        return call(*args, **kwargs)
    blocks = (mask or flex._create_empty_block_mask(query, key)).as_tuple()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    result, *sums = math_attention(query, key, value, score or flex._identity, blocks, scale, {})
    aux = flex.AuxOutput(*(x * math.log(2) for x in sums))  # it divides them by this
    if given.arguments["return_aux"] is not None:
        return result, aux
    return (result, aux.lse) if given.arguments["return_lse"] else result


@contextlib.contextmanager
def _code_of(function: Any, other: Any) -> Iterator[Callable[..., Any]]:
    """Context in which a function has the code of another; yields a function with its own code."""
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    own = types.FunctionType(before[0], function.__globals__, function.__name__, before[1])
    own.__kwdefaults__ = before[2]
    function.__code__, function.__defaults__, function.__kwdefaults__ = other.__code__, None, None
    try:
        yield own
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before


# The codes that the functions of torch have meanwhile, which run with the globals of their module.
def _handed_to_attend(*args: Any, **kwargs: Any) -> Any:
    return _autopar_attend(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _handed_to_make(*args: Any, **kwargs: Any) -> Any:
    return _autopar_make(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class LookupsByTensors(TorchFunctionMode):
    """Context in which `x[i, j]` by integer scalars of a trace is the operator `index`, which does not read values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, given = args
            indices = list(given) if isinstance(given, tuple) else [given]
            tensors = [i for i in indices if isinstance(i, Tensor)]
            if tensors and all(isinstance(i, Tensor) or type(i) is int for i in indices):
                like = tensors[0]
                return aten.index.Tensor(x, [i if isinstance(i, Tensor) else like.new_full((), i) for i in indices])
        return func(*args, **(kwargs or {}))
