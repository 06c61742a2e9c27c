"""The mesh of a pipeline stage: equal to that of the same stage alone, and no mesh of other ranks for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from autopar import _torch
from autopar._torch.distributed.stage_meshes import seen_from_outside


class Alone:
    """One stage."""

    def share(self, tensors: Any) -> Any:
        return list(tensors)


def test_checkpoints_pass_over_what_is_of_other_stages(group, tmp_path) -> None:
    plain = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    mesh = _torch.StageMesh(plain, Alone())
    here = _torch.dtensor(torch.arange(4.0), mesh, [Replicate()])
    parameter = torch.nn.Parameter(here.clone())
    there = _torch.elsewhere(parameter, mesh, frozenset({1}), torch.device("cpu")).detach()
    assert seen_from_outside(mesh) == mesh and mesh.get_coordinate() is not None
    assert there.device_mesh.get_coordinate() is None
    dcp.save({"here": here, "there": there}, checkpoint_id=tmp_path)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert list(saved) == ["here"]
    state = {"here": torch.zeros_like(here)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["here"].full_tensor().tolist() == [0, 1, 2, 3]
