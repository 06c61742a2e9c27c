"""scaled_dot_product_attention with every mask, over batch, heads, groups of heads, queries, and in a ring."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from proof import labels_of, prove

from tests.support.tables import often

KIND = "aten.scaled_dot_product_attention"
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 4, 6, 8
ALL = {"-", "b1", "b0", "q"}
GROUPED = ALL | {"group"}
RING = {"q>k"}


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def qkv(kv_heads=HEADS, queries=QUERIES, keys=KEYS):
    shapes = (HEADS, queries), (kv_heads, keys), (kv_heads, keys)
    return tuple(rand(BATCH, heads, length, WIDTH) for heads, length in shapes)


def attend(*tensors, **how):
    return F.scaled_dot_product_attention(*tensors, **how)


MASKS = {
    "all": (BATCH, HEADS, QUERIES, KEYS),
    "of the batch": (BATCH, 1, QUERIES, KEYS),
    "of the heads": (HEADS, QUERIES, KEYS),
    "one": (QUERIES, KEYS),
    "of the keys": (BATCH, 1, 1, KEYS),
}


@pytest.mark.parametrize(
    ("kv_heads", "name"),
    often(
        itertools.product((4, 2), MASKS),
        [(4, "all"), (2, "of the batch"), (2, "of the heads"), (4, "one"), (2, "of the keys")],
    ),
)
def test_masks(kv_heads, name):
    shape = MASKS[name]

    def hidden(*tensors):
        return attend(*tensors, enable_gqa=kv_heads < HEADS)

    visible = rand(*shape) > -0.5
    visible[..., 0] = True  # no query sees nothing
    for mask, rings in ((visible, RING), (rand(*shape), set())):  # a float mask requires a gradient
        tensors = *qkv(kv_heads), mask
        expected = (GROUPED if kv_heads < HEADS else ALL) | rings
        assert labels_of(hidden, *tensors, kind=KIND) == expected
        assert prove(hidden, *tensors, kind=KIND) == len(expected) + 1  # and the same everywhere


def test_a_float_mask_without_a_gradient_in_a_ring():
    def shifted(q, k, v, mask):
        return attend(q, k, v, mask.detach())

    for shape in MASKS.values():
        assert prove(shifted, *qkv(), rand(*shape), kind=KIND) == len(ALL | RING) + 1


def test_learned_queries_for_a_batch():
    query, (_, key, value) = rand(QUERIES, WIDTH), qkv()
    offered = labels_of(attend, query, key, value, kind=KIND)
    assert offered >= ALL
    assert prove(attend, query, key, value, kind=KIND) == len(offered) + 1


def test_a_query_that_sees_nothing():
    """Its result is zero, in a ring as on one device."""
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    seen[1], seen[2, : KEYS // 2] = False, False
    assert prove(attend, *qkv(), seen, kind=KIND) == len(ALL | RING) + 1


@pytest.mark.parametrize(
    ("keys", "kv_heads"), often(itertools.product((QUERIES, KEYS), (4, 2, 1)), [(QUERIES, 4), (KEYS, 2), (KEYS, 1)])
)
def test_causal(kv_heads, keys):
    def causal(*tensors):
        return attend(*tensors, is_causal=True, scale=0.3, enable_gqa=kv_heads < HEADS)

    tensors = qkv(kv_heads, keys=keys)
    offered = labels_of(causal, *tensors, kind=KIND)
    assert offered == (GROUPED if kv_heads == 2 else ALL) | RING
    assert prove(causal, *tensors, kind=KIND) == len(offered) + 1


def test_no_mask_and_a_scale():
    assert prove(lambda *t: attend(*t, scale=0.5), *qkv(), kind=KIND) == len(ALL | RING) + 1
