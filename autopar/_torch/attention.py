"""Fused attention that returns the log-sum-exp of every query, and its backward.

torch.distributed.tensor.experimental.context_parallel runs the same kernels, of CUDA alone, on DTensors of one axis
without masks. There is no public call of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
            gradient,
            query,
            key,
            value,
            result,
            logsumexp,
            *lengths,
            0.0,
            is_causal,
            *drawn,
            scale=scale,
        )
    finite = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, result, finite, 0.0, is_causal, attn_mask=bias, scale=scale
    )
