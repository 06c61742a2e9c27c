"""A process group of one rank, and a parameter on it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


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
