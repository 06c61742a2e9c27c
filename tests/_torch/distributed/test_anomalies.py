"""Anomaly detection looks at the gradients of DTensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar import _torch


def test_a_gradient_that_is_not_a_number_is_an_anomaly(group) -> None:
    _torch.detect_anomalies()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        (x * 3).sum().backward()
        assert x.grad.full_tensor().tolist() == [3.0] * 4
        with pytest.raises(RuntimeError, match="returned nan"), pytest.warns(UserWarning, match="Error detected"):
            (x.sqrt() * 0).sum().backward()
