"""Attention of a block of queries over a block of keys, for every offset of the two, against softmax written out."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from autopar import _torch
from autopar.ops import attention_block
from autopar.ops.attention_block import AttentionBlock

QUERIES, KEYS, WIDTH = (2, 4), (4, 6), 8


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("queries", QUERIES)
def test_a_query_sees_the_keys_up_to_its_offset(queries: int, keys: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(1, 2, rows, WIDTH, generator=generator, dtype=torch.float64)
        for rows in (queries, keys, keys, queries)
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    row, column = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    hidden = (column > row + offset).expand(queries, keys)
    scores = (leaves[0] @ leaves[1].mT / 3).masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    expected = weights.nan_to_num() @ leaves[2]

    block = AttentionBlock(query, key, value, None, offset, 1 / 3)
    result, logsumexp = block.attend()
    assert torch.allclose(result, expected.detach(), atol=1e-12)
    assert torch.allclose(logsumexp, torch.logsumexp(scores, -1).detach(), atol=1e-12)
    if hidden.all(-1).any():
        return
    expected.backward(gradient)
    found = block.attend_backward(result, logsumexp, gradient)
    for own, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(own, leaf.grad, atol=1e-12)


def test_scores_of_no_more_queries_than_fit_are_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.ones(1, 2, 4, WIDTH), torch.ones(1, 2, 6, WIDTH)
    bytes_of_a_query = 2 * 6 * 4
    monkeypatch.setattr(attention_block, "_SCORES_BYTES", 3 * bytes_of_a_query)
    assert [*AttentionBlock(query, key, key, None, 0, 1.0)._rows()] == [(0, 3), (3, 4)]


def test_only_a_square_block_is_a_triangle_to_a_fused_kernel() -> None:
    with mock.patch.object(_torch, "fused_attention", side_effect=_torch.fused_attention) as fused:
        for keys in (4, 6):
            query, key = torch.ones(1, 2, 4, WIDTH), torch.ones(1, 2, keys, WIDTH)
            AttentionBlock(query, key, key, None, 0, 1.0).attend()
    assert [call.kwargs["is_causal"] for call in fused.mock_calls] == [True, False]
