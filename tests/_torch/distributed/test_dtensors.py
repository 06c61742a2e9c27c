"""DTensors made of local shards, and the local shards of DTensors."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from autopar import _torch


def test_the_local_tensor_is_the_storage_of_the_dtensor(parameter):
    _torch.local_tensor(parameter).add_(1)
    assert _torch.local_addresses([parameter]) == [_torch.local_tensor(parameter).data_ptr()]
    assert parameter.full_tensor().tolist() == [1, 2, 3, 4]


def test_another_local_tensor_takes_the_place_of_the_first(parameter):
    before = _torch.local_tensor(parameter)
    _torch.set_local_tensor(parameter, before.clone())
    parameter.data.add_(1)
    assert parameter.full_tensor().tolist() == [1, 2, 3, 4] and before.tolist() == [0, 1, 2, 3]
    plain = torch.nn.Parameter(torch.zeros(2))
    _torch.set_local_tensor(plain, torch.ones(2))
    assert plain.tolist() == [1, 1]


def test_a_dtensor_over_a_part_of_a_buffer_can_be_copied(parameter):
    buffer = torch.arange(6.0)
    made = _torch.dtensor(buffer[2:].view(2, 2).t(), parameter.device_mesh, [Replicate()], (2, 2))
    twin = copy.deepcopy(made)
    made.add_(1)
    assert buffer.tolist() == [0, 1, 3, 4, 5, 6]
    assert made.full_tensor().tolist() == [[3, 5], [4, 6]]
    assert twin.full_tensor().tolist() == [[2, 4], [3, 5]]


def test_a_parameter_over_a_part_of_a_buffer_can_be_copied(parameter):
    buffer = torch.arange(6.0)
    stored = _torch.dtensor(buffer[2:], parameter.device_mesh, [Replicate()], (4,))
    made = _torch.parameter_of(stored, requires_grad=True)
    twin = copy.deepcopy(made)
    _torch.local_tensor(made).add_(1)
    assert buffer.tolist() == [0, 1, 3, 4, 5, 6] and made.requires_grad
    assert twin.full_tensor().tolist() == [2, 3, 4, 5] and isinstance(twin, torch.nn.Parameter)


def test_a_dtensor_over_a_part_of_a_conjugated_buffer(parameter):
    buffer = torch.complex(torch.arange(6.0), torch.ones(6))
    for part in (buffer[2:].conj(), buffer[2:].conj().imag):
        made = _torch.dtensor(part, parameter.device_mesh, [Replicate()], (4,))
        assert torch.equal(made.to_local(), part)


def test_a_dtensor_over_a_meta_shard(parameter):
    made = _torch.dtensor(torch.empty(4, 3, device="meta"), parameter.device_mesh, [Replicate()], (4, 3))
    assert isinstance(made, DTensor) and made.shape == (4, 3) and made.is_meta


def test_a_differentiable_local_leaves_a_dtensor_gradient(parameter):
    _torch.differentiable_local(parameter).pow(2).sum().backward()
    assert parameter.grad.placements == (Shard(0),)
    assert parameter.grad.full_tensor().tolist() == [0, 2, 4, 6]


def test_gradients_accumulate(parameter):
    _torch.accumulate_gradient(parameter, torch.ones(4))
    _torch.accumulate_gradient(parameter, torch.ones(4))
    assert parameter.grad.full_tensor().tolist() == [2, 2, 2, 2]


def test_plain_tensors_may_be_taken_for_replicated_ones():
    with implicit_replication():
        assert _torch.replicates_implicitly()
    assert not _torch.replicates_implicitly()


def test_the_ranks_of_a_mesh_are_numbers_even_among_fake_tensors(parameter):
    with FakeTensorMode():
        assert _torch.ranks_of(parameter.device_mesh) == (0,)


def test_a_gradient_through_a_local_shard_has_a_gradient(parameter):
    (gradient,) = torch.autograd.grad(_torch.differentiable_local(parameter).pow(3).sum(), parameter, create_graph=True)
    assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements
    gradient.to_local().sum().backward()
    expected = 6 * _torch.local_tensor(parameter)
    assert _torch.local_gradient(parameter).equal(expected)


@pytest.fixture
def stored_on_host(parameter, monkeypatch):
    """A parameter whose shard lies on another device than that of its mesh, as one on the host of a GPU does."""
    resources = importlib.import_module("torch.distributed.device_mesh")._mesh_resources
    monkeypatch.setattr(resources, "num_devices_per_host", lambda _: 1)
    mesh = init_device_mesh("meta", (1,), mesh_dim_names=("x",))
    return nn.Parameter(_torch.dtensor(torch.arange(4.0), mesh, [Shard(0)], (4,)))


def test_what_is_made_like_a_parameter_on_the_host_stays_there(stored_on_host):
    _torch.differentiable_local(stored_on_host).pow(2).sum().backward()
    assert stored_on_host.grad._local_tensor.tolist() == [0, 2, 4, 6]
    _torch.make_states_by(lambda shape, dtype: torch.empty(shape, dtype=dtype), stored_on_host)
    assert torch.ones_like(stored_on_host)._local_tensor.tolist() == [1, 1, 1, 1]
    whole = _torch.cut_like(torch.full((4,), 5.0), stored_on_host)
    assert whole._local_tensor.tolist() == [5, 5, 5, 5]


def test_shards_of_one_size_need_no_shape(parameter):
    made = _torch.dtensor(torch.ones(2, 3), parameter.device_mesh, [Replicate()])
    assert made.shape == (2, 3) and made.placements == (Replicate(),)
