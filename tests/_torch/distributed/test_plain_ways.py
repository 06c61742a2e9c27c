"""Averages of models whose parameters are DTensors and whose buffers are not; anomalies in gradients of DTensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from autopar import _torch
from autopar._torch.distributed.plain_ways import average_dtensors_apart


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": get_ema_avg_fn(0.5)}],
    ids=["mean", "lists", "one by one"],
)
@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_average_takes_parameters_and_buffers(group, options, use_buffers) -> None:
    average_dtensors_apart()
    mesh, found = init_device_mesh("cpu", (1,), mesh_dim_names=("x",)), []
    for is_cut in (False, True):
        model = nn.BatchNorm1d(4)
        if is_cut:
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
            model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Shard(0)]))
        average = AveragedModel(model, use_buffers=use_buffers, **options)
        for number in range(3):
            with torch.no_grad():
                for x in (*model.parameters(), model.running_mean, model.running_var):
                    x.add_(number)
            average.update_parameters(model)
        tensors = [*average.module.parameters(), *average.module.buffers()]
        found.append([getattr(x, "full_tensor", lambda x=x: x)().tolist() for x in tensors])
    assert found[0] == found[1]


def test_a_gradient_that_is_not_a_number_is_an_anomaly(group) -> None:
    _torch.detect_anomalies()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        (x * 3).sum().backward()
        assert x.grad.full_tensor().tolist() == [3.0] * 4
        with pytest.raises(RuntimeError, match="returned nan"), pytest.warns(UserWarning, match="Error detected"):
            (x.sqrt() * 0).sum().backward()
