"""Where restored optimizer states lie, and under which names they are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.runtime.formats.optimizer_state import Restorer, empty_like, read_state, ties
from tests.runtime.models import Tied


@pytest.fixture
def parameter(tmp_path: Path) -> Iterator[nn.Parameter]:
    """A sharded parameter on the one rank of a group."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    yield nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    dist.destroy_process_group()


def test_states_lie_as_their_use_wants(parameter: nn.Parameter) -> None:
    moment = empty_like(parameter, "exp_avg", torch.Size([4, 2]), torch.bfloat16)
    assert isinstance(moment, DTensor) and moment.placements == (Shard(0),)
    assert moment.dtype is torch.bfloat16 and not moment.requires_grad
    rows = empty_like(parameter, "row_var", torch.Size([4, 1]), torch.float32)
    assert isinstance(rows, DTensor) and rows.placements == (Replicate(),)
    step = empty_like(parameter, "step", torch.Size([]), torch.float32)
    assert not isinstance(step, DTensor)


def test_the_step_of_a_number_is_a_plain_tensor(parameter: nn.Parameter) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    number = nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
    assert not isinstance(empty_like(number, "step", number.shape, torch.float32), DTensor)
    assert isinstance(empty_like(number, "exp_avg", number.shape, torch.float32), DTensor)


def test_names_and_groups() -> None:
    model = Tied()
    optimizer = torch.optim.Adam([{"params": model.head.weight, "lr": 0.5}, *_middle(model)])
    model.middle.bias.grad = torch.ones(8)
    optimizer.step()
    state = read_state(model, optimizer)
    assert ties(model) == {"head.weight": "embedding.weight"}
    assert [names for names, _ in state.groups] == [["embedding.weight"], ["middle.weight"], ["middle.bias"]]
    assert [options["lr"] for _, options in state.groups] == [0.5, 1e-3, 1e-3]
    assert list(state.tensors["middle.bias"]) == ["step", "exp_avg", "exp_avg_sq"]
    assert not state.tensors["embedding.weight"]


def _middle(model: Tied) -> list[dict[str, nn.Parameter]]:
    return [{"params": p} for p in model.middle.parameters()]


def test_a_parameter_is_found_by_any_of_its_names() -> None:
    """Also where it is tied in the saved model only, or in this one only."""
    tied, two = Tied(), Tied()
    two.head.weight = nn.Parameter(torch.zeros(16, 8))
    optimizer = torch.optim.Adam([two.head.weight])
    saved = [(["embedding.weight"], {"lr": 0.5})]
    restorer = Restorer(two, optimizer, saved, {"head.weight": "embedding.weight"})
    assert list(restorer.sources()) == ["embedding.weight"]
    restorer.restore({})
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer = torch.optim.Adam([tied.head.weight])
    assert list(Restorer(tied, optimizer, [(["head.weight"], {})], {}).sources()) == ["head.weight"]
