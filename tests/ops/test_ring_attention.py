"""A ring of ranks in one process against attention over the whole sequence."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from autopar.ir import Mesh
from autopar.ops.ring import Ring
from autopar.ops.ring_attention import Scoring
from autopar.ops.ring_place import RingPlace, route, runs
from autopar.proof.lockstep_rings import attend_together

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def drawn(queries, keys, dtype=torch.float64, value_width=WIDTH):
    draw = torch.Generator().manual_seed(queries + keys)
    shapes = (HEADS, queries, WIDTH), (KV_HEADS, keys, WIDTH), (KV_HEADS, keys, value_width)
    return [torch.randn(2, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def together(mesh, tensors, turns, how):
    """Result and gradients of the whole, of which every rank has its part; keys are split along `turns` alone."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    ring = Ring((0, 1, 2, None), mesh.sizes, mesh.names, turns, how)
    owners = [[mesh.coordinates(rank)[i] for i in turns] for rank in range(mesh.size)]
    sizes = [mesh.sizes[i] for i in turns]
    blocks = [list(itertools.product(*map(range, sizes))).index(tuple(x)) for x in owners]
    count = len({*blocks})
    values = {
        0: list(leaves[0].chunk(mesh.size, 2)),
        **{i: [leaves[i].chunk(count, 2)[b] for b in blocks] for i in (1, 2)},
    }
    found = attend_together(ring, mesh, values)
    result = torch.cat([each for each, _ in found], 2)
    gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    result.backward(gradient.to(result.dtype))
    return result.detach(), *(x.grad for x in leaves)


def alone(tensors, is_causal):
    leaves = [x.double().requires_grad_() for x in tensors]
    result = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True)
    gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    result.backward(gradient)
    return result.detach(), *(x.grad for x in leaves)


MESHES = ["a=2", "a=3", "a=4", "a=2,b=2", "a=3,b=2", "a=2,b=2,c=2"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_width", [WIDTH, 6], ids=["fused", "products"])
def test_a_ring_equals_one_device(mesh, is_causal, value_width):
    """Where values are narrower than keys no fused kernel runs."""
    mesh = Mesh.parse(mesh)
    tensors = drawn(24, 24, value_width=value_width)
    every = tuple(range(len(mesh.axes)))
    found = together(mesh, tensors, every, Scoring(is_causal, 0.3))
    for x, y in zip(found, alone(tensors, is_causal), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("turns", [(0,), (1,)])
@pytest.mark.parametrize("lengths", [(24, 24), (8, 24), (24, 8)])
def test_queries_may_be_split_further_than_keys(turns, lengths):
    """Causal blocks then are not triangles; nor where there are more queries than keys, or fewer."""
    mesh, tensors = Mesh.of({"a": 2, "b": 2}), drawn(*lengths)
    found = together(mesh, tensors, turns, Scoring(True, 0.3))
    for x, y in zip(found, alone(tensors, True), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("value_width", [WIDTH, 6], ids=["fused", "products"])
def test_sums_over_blocks_of_half_precision_are_wide(value_width):
    tensors = drawn(64, 64, torch.bfloat16, value_width)
    found = together(Mesh.of({"a": 8}), tensors, (0,), Scoring(True, 0.3))
    for x, y in zip(found, alone(tensors, True), strict=True):
        assert x.dtype is torch.bfloat16
        torch.testing.assert_close(x.double(), y, atol=0.02 * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize("length", [4, 6, 20])
def test_rows_of_any_number_are_dealt_out(length):
    """One row a rank is not, and the two chunks of an odd number are of two sizes."""
    tensors = drawn(length, length)
    found = together(Mesh.of({"a": 2}), tensors, (0,), Scoring(True, 0.3))
    for x, y in zip(found, alone(tensors, True), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_as_much_to_do_with_each_block(ranks):
    """Of 2 n chunks: with the block of another rank it has two pairs of chunks, with its own one and two halves."""
    chunk = 4
    for place in range(ranks):
        for number in range(ranks):
            seen = 0
            for rows in runs(place, 2 * chunk, ranks, dealt=True):
                for keys in runs(number, 2 * chunk, ranks, dealt=True):
                    pairs = itertools.product(range(chunk), range(chunk))
                    seen += sum(rows.first + i >= keys.first + j for i, j in pairs)
            assert seen == 2 * chunk**2 + (chunk if place == number else 0)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (3, 3, 2)])
def test_every_block_comes_by_once_and_goes_home(sizes):
    ranks = [*itertools.product(*map(range, sizes))]
    assert len(route(sizes)) == len(ranks) - 1
    for position in ranks:
        place = RingPlace(sizes, (True,) * len(sizes), position)
        stops = [number for number, _ in place.stops()]
        assert stops[0] == place.block and sorted(stops) == [*range(len(ranks))]
    assert len(place.way_home()) <= len(sizes)
    if sizes[0] % 2 == 0 or len(sizes) == 1:
        assert len(place.way_home()) == 1
