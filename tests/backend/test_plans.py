"""Plans for graphs of torch.compile."""

from __future__ import annotations

import torch
from torch import nn

from autopar.backend.plans import plan_of
from autopar.cost_model import find_hardware
from autopar.ir import Mesh
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request import Request


def test_a_plan_has_no_slices_of_saved_tensors_which_no_graph_makes() -> None:
    mesh = Mesh.parse("x=2,y=2")
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    prepared = prepare_step(model, (torch.randn(4, 8, 16),), {}, loss_fn=torch.mean)
    request = Request(find_hardware("cpu-gloo"), mesh=mesh, recipe="2d", recompute="none")
    assert make_plan(prepared, request).saved
    plan = plan_of(prepared, mesh, request, {})
    assert plan.saved == {} and plan.recipe == "2d"
