"""Each torch API without a stability promise that autopar uses, alone: what breaks here broke in torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar import _torch
from autopar.runtime.collectives import group_name


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A Gloo group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def parameter(group):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    return nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))


X = torch.arange(6.0).reshape(2, 3)


def test_a_group_is_found_by_its_name(group):
    assert _torch.resolve_group(group_name(group)).rank() == 0


def test_the_timeout_of_a_group_is_set(group):
    _torch.set_group_timeout(group, 7.0)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7.0


def test_functional_collectives_of_one_rank_return_their_input(group):
    name = group_name(group)
    assert torch.equal(_torch.all_reduce(X, name), X)
    assert torch.equal(_torch.all_gather(X, 1, name), X)
    assert torch.equal(_torch.reduce_scatter(X, 1, name), X)
    assert torch.equal(_torch.all_to_all(X, 1, name), X)


def test_started_collectives_leave_their_result(group):
    x, result = X.flatten().clone(), torch.zeros(6)
    _torch.start_all_reduce(x, group).wait()
    assert torch.equal(x, X.flatten())
    _torch.start_all_gather(result, x, group).wait()
    assert torch.equal(result, x)
    result.zero_()
    _torch.start_reduce_scatter(result, x, group).wait()
    assert torch.equal(result, x)


def test_the_local_tensor_is_the_storage_of_the_dtensor(parameter):
    _torch.local_tensor(parameter).add_(1)
    assert parameter.full_tensor().tolist() == [1, 2, 3, 4]


def test_a_dtensor_over_a_meta_shard(parameter):
    made = _torch.dtensor(
        torch.empty(4, 3, device="meta"), parameter.device_mesh, [Replicate()], (4, 3)
    )
    assert isinstance(made, DTensor) and made.shape == (4, 3) and made.is_meta


def test_a_differentiable_local_leaves_a_dtensor_gradient(parameter):
    _torch.differentiable_local(parameter).pow(2).sum().backward()
    assert parameter.grad.placements == (Shard(0),)
    assert parameter.grad.full_tensor().tolist() == [0, 2, 4, 6]


def test_gradients_accumulate(parameter):
    _torch.accumulate_gradient(parameter, torch.ones(4))
    _torch.accumulate_gradient(parameter, torch.ones(4))
    assert parameter.grad.full_tensor().tolist() == [2, 2, 2, 2]


def test_custom_functions_are_seen():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    with _torch.custom_functions() as seen:
        Twice.apply(torch.ones(1))
    assert [name.split(".")[-1] for name in seen] == ["Twice"]
    Twice.apply(torch.ones(1))
    assert len(seen) == 1


def test_a_storage_reference_knows_views_of_one_storage():
    x = torch.zeros(4)
    assert _torch.storage_reference(x).cdata == _torch.storage_reference(x[1:]).cdata


def test_below_autograd_an_op_records_nothing(group):
    x = torch.ones(2, requires_grad=True)
    call = (x, [], 1, group_name(group), "vary")
    assert _torch.autopar_op("all_reduce")(*call).requires_grad
    with _torch.below_autograd():
        assert not _torch.autopar_op("all_reduce")(*call).requires_grad


def test_the_line_of_an_error_is_the_users():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        assert "torch.ones(2) @ torch.ones(3)" in _torch.user_line(error)
