"""Transfers: many tensors in one collective arrive as each would alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.ir import WHOLE, Dims, Layout, Mesh, R, S, V
from autopar.ops.sharding import shard
from autopar.proof.verdict import nan_last
from autopar.runtime.collectives.hops import route, signature, transposed
from autopar.runtime.collectives.transfer import Transfer, travel
from autopar.runtime.ranks.world import World
from tests.runtime.gloo_ranks import Ranks

MESH = Mesh.of({"a": 2, "b": 2})
DIMS: list[Dims] = [((4,), (3,)), ((8,), ()), ((2, 4), (5,))]
CASES: list[tuple[Layout, Layout]] = [((S(0), R), (V, R)), ((S(0), R), (V, V)), ((R, S(0)), (V, R)), ((R, R), (V, V))]
EXCHANGED: list[tuple[Layout, Layout]] = [((S(0), R), (S(1), R)), ((R, S(1)), (R, S(0)))]
EVEN: list[Dims] = [((4,), (6,)), ((8,), (2, 2)), ((2, 4), (4,))]
NESTED: list[tuple[Layout, Layout]] = [
    ((S(0), S(0)), (V, V)),
    ((S(0), S(0)), (S(0), R)),
    ((S(0), S(0)), (V, S(0))),  # un-nested and nested again
    ((S(0, WHOLE), S(0, WHOLE)), (R, R)),
]


def test_routes_of_equal_signature_share_a_collective() -> None:
    there = [route(dims, (S(0), R), (V, V), MESH, rank=0) for dims in DIMS]
    assert {signature(hops) for hops in there} == {(("all_gather", 0),)}
    back = [transposed(hops) for hops in there]
    assert {frozenset(signature(hops)) for hops in back} == {frozenset({("reduce_scatter", 0), ("all_reduce", 1)})}


def test_axes_of_one_rank_need_no_hop() -> None:
    assert route(((4,),), (S(0), R), (V, V), Mesh.of({"a": 1, "b": 1}), rank=0) == ()


def worst() -> float:
    """The largest difference between flat transfers and the ops of the graph, there and back."""
    world = World(MESH, torch.device("cpu"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    differences = [0.0]
    for source, target in CASES + NESTED + EXCHANGED:
        used = DIMS if (source, target) in CASES else [((8,), (3,)), ((4,), ())]
        used = EVEN if (source, target) in EXCHANGED else used
        there = [route(dims, source, target, MESH, rank=0) for dims in used]
        if len({signature(hops) for hops in there}) > 1:
            continue
        fulls = [torch.randn([max(1, torch.Size(d).numel()) for d in dims], dtype=torch.float64) for dims in used]
        shards = [shard(x, d, source, MESH, world.rank).requires_grad_() for x, d in zip(fulls, used, strict=True)]
        expected = [travel(x, hops, world) for x, hops in zip(shards, there, strict=True)]
        found = Transfer(there, [x.detach() for x in shards], world).wait()
        grads = [torch.randn_like(x) for x in expected]
        torch.autograd.backward(expected, grads)
        back = Transfer([transposed(hops) for hops in there], [g.clone() for g in grads], world).wait()
        differences += [_largest(a - b) for a, b in zip(found, expected, strict=True)]
        differences += [_largest(a - x.grad) for a, x in zip(back, shards, strict=True)]  # type: ignore[operator]
    return max(differences, key=nan_last)


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


@pytest.mark.multiprocess
def test_flat_transfers_equal_single_ones(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(worst), key=nan_last) < 1e-12
