"""`Owned`, the placement of a DTensor that one rank has, on a world of one rank."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar import _torch


def owned(parameter, owner):
    """A DTensor of 4 numbers on a mesh of one rank, whose owner may be another."""
    local = torch.arange(4.0) if owner == 0 else torch.empty(0)
    return _torch.dtensor(local, parameter.device_mesh, [_torch.Owned(owner)], (4,))


def test_owners_differ_and_torch_takes_each_for_a_shard():
    assert _torch.Owned(0) == _torch.Owned(0) != _torch.Owned(1)
    assert _torch.Owned(1) == Shard(0) == _torch.Owned(1) and _torch.Owned(0) != Shard(1)
    assert _torch.Owned(0) != Replicate()
    assert pickle.loads(pickle.dumps(_torch.Owned(2))) == _torch.Owned(2)
    assert (str(_torch.Owned(2)), repr(_torch.Owned(2))) == ("O(2)", "Owned(2)")


@pytest.mark.parametrize(("owner", "shape", "offset"), [(0, (4,), (0,)), (1, (0,), (4,))])
def test_a_checkpoint_learns_which_part_a_rank_has(parameter, owner, shape, offset):
    x = owned(parameter, owner)
    assert compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements) == (shape, offset)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, torch.Tensor.detach])
def test_a_cache_that_finds_a_shard_under_the_same_hash_takes_it_for_no_owner(parameter, make, monkeypatch):
    monkeypatch.setattr(_torch.Owned, "__hash__", lambda _: hash(Shard(0)))
    shard = _torch.dtensor(torch.arange(4.0), parameter.device_mesh, [Shard(0)], (4,))
    for x in (shard, owned(parameter, 0), shard):
        assert type(make(x).placements[0]) is type(x.placements[0])


def test_a_copy_has_the_owner_of_what_was_copied(parameter):
    x = owned(parameter, 0)
    assert type(_torch.copied(x).placements[0]) is _torch.Owned
    assert _torch.local_tensor(_torch.copied(x)).tolist() == [0, 1, 2, 3]
    assert type(_torch.owned_as(x.clone(), x).placements[0]) is _torch.Owned
    assert _torch.owned_as(parameter, parameter) is parameter


@pytest.mark.skipif(not "2.13" <= torch.__version__ < "2.14", reason="a clone has the owner under other torches")
def test_a_clone_has_no_owner(parameter):
    """Why `copied` is there."""
    assert type(owned(parameter, 0).clone().placements[0]) is Shard


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, torch.Tensor.detach])
def test_states_are_made_where_the_parameter_is(parameter, owner, make):
    made = make(owned(parameter, owner))
    assert made.placements[0].owner == owner
    assert len(_torch.local_tensor(made)) == (4 if owner == 0 else 0)


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_update_in_place(parameter, way):
    given = [torch.nn.Parameter(owned(parameter, owner)) for owner in (0, 1)]
    for p in given:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(given, lr=0.5, weight_decay=0, **way).step()
    assert _torch.local_tensor(given[0]).tolist() == pytest.approx([-0.5, 0.5, 1.5, 2.5], abs=1e-6)
    assert [p.placements[0].owner for p in given] == [0, 1]


def test_a_whole_tensor_is_cut_without_sending(parameter):
    whole = torch.tensor([4.0, 3.0, 2.0, 1.0])
    cut = _torch.cut_like(whole, owned(parameter, 0))
    assert isinstance(cut, DTensor) and _torch.local_tensor(cut).equal(whole)
    assert _torch.cut_like(whole, parameter).full_tensor().equal(whole)


def test_what_lies_in_a_buffer_or_has_an_owner_is_copied_deeply(parameter):
    _torch.update_by_shards(lambda _: False)()
    inside = _torch.dtensor(torch.arange(8.0)[4:], parameter.device_mesh, [Shard(0)], (4,))
    for x in (inside, owned(parameter, 0)):
        found = copy.deepcopy([x, x])
        assert found[0] is found[1] is not x and type(found[0].placements[0]) is type(x.placements[0])
        assert _torch.local_tensor(found[0]).tolist() == _torch.local_tensor(x).tolist()
