"""Plain tensors that are written into DTensors: each rank takes its part."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar import _torch
from autopar.errors import StepError


def test_a_plain_operand_is_cut_for_a_write_in_place(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain, values, row = torch.zeros(4, 6), torch.arange(24.0).view(4, 6), torch.ones(6)
    cut = distribute_tensor(plain.clone(), mesh, [Shard(1)])
    for x in (plain, cut):
        x.copy_(values).add_(row, alpha=2.0).mul_(values).lerp_(values, 0.25).addcmul_(values, row)
        x += row
        x /= values + 1
    assert isinstance(cut, DTensor) and cut.placements == (Shard(1),)
    assert cut.full_tensor().equal(plain)


class Lazy:
    """A tensor that a checkpoint reads when an operator asks for it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        whole = [torch.ones(4) if isinstance(x, cls) else x for x in args]
        return function(*whole, **(kwargs or {}))


def test_a_plain_operand_is_cut_where_no_method_was_called(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    cut = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    torch.Tensor.copy_(cut, torch.arange(4.0))
    torch.Tensor.add_(cut, Lazy())
    assert cut.full_tensor().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_scalar_and_a_dtensor_are_left_to_torch(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    cut.mul_(3).add_(cut, alpha=2).mul_(torch.tensor(0.5))
    assert cut.full_tensor().tolist() == [4.5] * 4


def test_a_dtensor_of_another_mesh_is_gathered(group) -> None:
    _torch.cut_whole_operands()
    before = init_device_mesh("cpu", (1,), mesh_dim_names=("all",))
    after = init_device_mesh("cpu", (1, 1), mesh_dim_names=("x", "y"))
    shadow = distribute_tensor(torch.zeros(4), before, [Replicate()])
    now = distribute_tensor(torch.ones(4), after, [Shard(0), Replicate()])
    shadow.lerp_(now, 0.25)
    assert shadow.placements == (Replicate(),) and shadow.full_tensor().tolist() == [0.25] * 4


def test_an_operand_that_autograd_follows_is_not_cut(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    factor = torch.ones(4, requires_grad=True)
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        cut.mul_(factor)
    with torch.no_grad():
        assert cut.mul_(factor * 2).full_tensor().tolist() == [2.0] * 4


def test_a_write_into_a_slice_that_was_gathered_is_refused(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    cut = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    cut[:, 0].add_(1)
    cut.t().mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    for write in (lambda x: x.add_(1), lambda x: x.copy_(torch.ones(2)), lambda x: x.zero_(), lambda x: x.normal_()):
        with pytest.raises(StepError, match=r"slice of shape \[2\].*write would be lost.*p\.copy_\(whole\)"):
            row = cut[0]
            row._local_tensor = row._local_tensor.clone()  # as torch gathers it of several ranks
            write(row)
    assert cut.full_tensor().tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]
    whole = cut.detach().full_tensor()
    whole[0].add_(1)
    assert cut.copy_(whole).full_tensor()[0].tolist() == [2, 1]


def test_slices_and_masks_of_all_are_written(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = torch.arange(24.0).view(4, 6)
    cut = distribute_tensor(plain.clone(), mesh, [Shard(1)])
    for x in (plain, cut):
        x[0] = torch.ones(6)
        x[1, 2:4] = 7.0
        x[..., None][2] = 3
        x[x > 20] = -1.0
    assert cut.full_tensor().equal(plain)
    for index, value in ((torch.tensor([0]), 1.0), (plain > 0, 1.0), (cut > 0, torch.ones(1)), ([0, 1], 1.0)):
        with pytest.raises(StepError, match=r"whole\[index\] = value; x\.copy_\(whole\)"):
            cut[index] = value


def test_a_copy_from_before_the_plan_is_cut_as_the_parameter_lies(group) -> None:
    _torch.cut_whole_operands()
    before = init_device_mesh("cpu", (1,), mesh_dim_names=("all",))
    after = init_device_mesh("cpu", (1, 1), mesh_dim_names=("x", "y"))
    old = distribute_tensor(torch.full((4,), 2.0), before, [Replicate()])
    now = distribute_tensor(torch.arange(4.0), after, [Shard(0), Replicate()]).requires_grad_()
    for found, expected in ((now - old, -2), (old + now, 2), (old.sub(now, alpha=2), 2), (now * old, 0), (old / 2, 1)):
        assert found.full_tensor()[0].item() == expected
    (now - old).square().sum().backward()
    assert now.grad.full_tensor().tolist() == [-4, -2, 0, 2] and now.grad.device_mesh == after
    with pytest.raises(RuntimeError, match="different mesh"):
        now + old.requires_grad_()


def test_a_dtensor_is_gathered_for_a_plain_tensor(group) -> None:
    _torch.cut_whole_operands()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    weight = torch.arange(4.0)
    part, averages = distribute_tensor(weight, mesh, [Shard(0)]), [torch.ones(4), torch.ones(4)]
    for average, x in zip(averages, (weight, part), strict=True):
        average.mul_(0.9).add_(x, alpha=0.1).sub_(x).lerp_(x, 0.5)
        torch._foreach_lerp_([average], [x], 0.25)
        torch._foreach_add_([average], [x], alpha=2.0)
        torch._foreach_copy_([average[:1]], [x[:1]])
    assert type(averages[1]) is torch.Tensor and averages[1].equal(averages[0])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        averages[1].add_(part.requires_grad_())
