"""Random numbers in DTensors: those of the whole tensor, and those of torch where it tells shards apart."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from autopar import _torch


def test_a_dtensor_draws_what_a_plain_tensor_draws(group) -> None:
    _torch.draw_whole_on_processors()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = torch.zeros(4, 6)
    cut = distribute_tensor(plain.clone(), mesh, [Shard(1)])
    for fill in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, torch.Tensor.random_):
        for x in (plain, cut):
            torch.manual_seed(0)
            fill(x)
        assert cut.full_tensor().equal(plain), fill
    generator = torch.Generator()
    found = [x.normal_(generator=generator.manual_seed(1)) for x in (plain, cut)]
    assert found[1] is cut and cut.full_tensor().equal(plain)


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        functools.partial(torch.randint_like, high=5),
        functools.partial(torch.randint_like, low=-1, high=5),
        torch.bernoulli,
        torch.nn.functional.dropout,
    ],
)
def test_what_is_drawn_beside_a_dtensor_is_what_is_drawn_beside_a_plain_tensor(group, draw) -> None:
    _torch.draw_whole_on_processors()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    plain = torch.linspace(0, 1, 24).view(4, 6)
    cut, noise = distribute_tensor(plain.clone(), mesh, [Shard(1)]), []
    for x in (plain, cut):
        torch.manual_seed(2)
        noise.append(draw(x))
    assert isinstance(noise[1], DTensor) and noise[1].placements == cut.placements
    assert noise[1].full_tensor().equal(noise[0])


def test_what_is_still_to_be_summed_is_left_to_torch(group) -> None:
    _torch.draw_whole_on_processors()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    torch.manual_seed(0)
    assert torch.rand_like(partial).placements != (Shard(0),)
