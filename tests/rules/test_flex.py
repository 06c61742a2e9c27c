"""flex_attention with masks of documents, causal, of a window, of a prefix, over batch, heads, groups and queries."""

import pytest
import torch
import torch.nn.functional as F
from proof import labels_of, prove
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

KIND = "autopar.flex_attention"
BATCH, HEADS, ROWS, WIDTH = 2, 4, 16, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 8, [0] * 12 + [1] * 4])
PREFIXES = torch.tensor([3, 7])


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def qkv(kv_heads=HEADS):
    return tuple(rand(BATCH, heads, ROWS, WIDTH) for heads in (HEADS, kv_heads, kv_heads))


MASKS = {
    "documents": lambda x: lambda b, h, q, k: (x[b, q] == x[b, k]) & (q >= k),
    "causal": lambda x: lambda b, h, q, k: q >= k,
    "window": lambda x: lambda b, h, q, k: (q >= k) & (q - k < 5),
    "prefix": lambda x: lambda b, h, q, k: (k < x[b]) | (q >= k),
}
TENSORS = {"documents": (DOCUMENTS,), "prefix": (PREFIXES,)}


def attending(name):
    """Attention with a mask; outside of a capture by its definition, because torch has no backward on a processor."""

    def attend(query, key, value, tensor=None):
        grouped, seen = query.shape[1] != key.shape[1], MASKS[name](tensor)
        if torch.compiler.is_exporting():
            mask = create_block_mask(seen, BATCH, None, ROWS, ROWS, "cpu")
            return flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
        dense = create_mask(seen, BATCH, None, ROWS, ROWS, "cpu")
        return F.scaled_dot_product_attention(query, key, value, dense, enable_gqa=grouped)

    return attend


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    tensors = *qkv(), *TENSORS.get(name, ())
    assert labels_of(attending(name), *tensors, kind=KIND) == {"-", "b", "g", "q"}
    assert prove(attending(name), *tensors, kind=KIND) == 5  # and the same everywhere
