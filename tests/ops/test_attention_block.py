"""Attention of a block of queries over a block of keys, for every offset of the two, against softmax written out."""

from __future__ import annotations

import pytest
import torch

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
