"""Fused attention with its log-sum-exp, against products and a softmax."""

import math

import pytest
import torch
import torch.nn.functional as F

from autopar import _torch

SCALE = 0.3


def tensors(heads=4, rows=6, columns=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (heads, rows), (2, columns), (2, columns), (heads, rows)
    return [torch.randn(2, h, n, 8, generator=draw, dtype=torch.float64) for h, n in shapes]


@pytest.mark.parametrize("kind", ["all", "causal", "bias"])
def test_result_logsumexp_and_gradients(kind):
    """Grouped queries; with a bias one query sees nothing."""
    query, key, value, gradient = tensors()
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen = {"all": seen, "causal": seen.tril(), "bias": seen.tril(-1)}[kind]
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float64).masked_fill(~seen, -math.inf)
    given = bias if kind == "bias" else None
    how = {"is_causal": kind == "causal", "scale": SCALE}
    result, logsumexp = _torch.fused_attention(query, key, value, given, **how)
    scores = query @ key.repeat_interleave(2, 1).mT * SCALE + bias
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))

    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*leaves, bias, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(result, expected)
    expected.backward(gradient)
    found = _torch.fused_attention_backward(gradient, query, key, value, given, result, logsumexp, **how)
    for x, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(x, leaf.grad)


def test_which_tensors_it_takes():
    query, key, value, _ = tensors()
    assert _torch.has_fused_attention(query, key, value, None)
    assert _torch.has_fused_attention(query, key, value, torch.zeros(6, 6))
    assert not _torch.has_fused_attention(query, key, value[..., :4], None)
    assert not _torch.has_fused_attention(query.mT.contiguous().mT, key, value, None)
    assert not _torch.has_fused_attention(*(x.to("meta") for x in (query, key, value)), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernels_of_cuda_agree_with_those_of_a_processor(is_causal):
    found = []
    for device in ("cpu", "cuda"):
        query, key, value, gradient = (x.to(device, torch.bfloat16) for x in tensors())
        how = {"is_causal": is_causal, "scale": SCALE}
        assert _torch.has_fused_attention(query, key, value, None)
        both = _torch.fused_attention(query, key, value, None, **how)
        gradients = _torch.fused_attention_backward(gradient, query, key, value, None, *both, **how)
        found.append([x.float().cpu() for x in (*both, *gradients)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=0.03, rtol=0.03)


def test_the_kernels_of_cuda_are_called_with_what_they_take():
    """On tensors without values, which every machine has."""
    query, key, value, _ = (x.to("meta", torch.bfloat16) for x in tensors())
    result, logsumexp = _torch.fused_attention(query, key, value, None, is_causal=True, scale=SCALE)
    assert result.shape == query.shape and logsumexp.shape == query.shape[:3]
    found = _torch.fused_attention_backward(
        result, query, key, value, None, result, logsumexp, is_causal=True, scale=SCALE
    )
    assert [x.shape for x in found] == [query.shape, key.shape, value.shape]
