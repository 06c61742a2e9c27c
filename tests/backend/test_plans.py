"""Plans for graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.backend import plans
from autopar.backend.plans import leaves_mesh_open, meshes, plan_of
from autopar.cost_model import find_hardware
from autopar.errors import SearchError
from autopar.ir import Mesh, Plan
from autopar.pipeline.composed import composed
from autopar.planning.planning import Prepared, make_plan, prepare_step, search_step
from autopar.search import RecipeLike
from autopar.search.candidates.trials import Searched
from autopar.search.request.request import Request


def test_a_plan_has_no_slices_of_saved_tensors_which_no_graph_makes() -> None:
    mesh = Mesh.parse("x=2,y=2")
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    prepared = prepare_step(model, (torch.randn(4, 8, 16),), {}, loss_fn=torch.mean)
    request = Request(find_hardware("cpu-gloo"), mesh=mesh, recipe="2d", recompute="none")
    assert make_plan(prepared, request).saved
    plan = plan_of(prepared, request, {})
    assert plan.saved == {} and plan.recipe == "2d"


def _wide() -> Prepared:
    layers = [nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)]
    model, x = nn.Sequential(*layers).to("meta"), torch.empty(8, 2048, 2048, device="meta")
    return prepare_step(model, (x,), {}, loss_fn=torch.mean)


def test_an_open_mesh_is_the_fastest_of_all() -> None:
    prepared, hardware = _wide(), find_hardware("cpu-gloo")
    asked = Request(hardware, ranks=16, offload=False)
    plan = plan_of(prepared, asked, {})
    # 8 samples do not divide into 16 parts, so that one axis of 16 ranks is not the best.
    assert len(plan.mesh.axes) == 2

    def seconds(plan: Plan) -> float:
        return composed(prepared.analysis.graph, plan, hardware).step_seconds

    named = [plan_of(prepared, asked.but(mesh=mesh), {}) for mesh in meshes(asked)]
    assert seconds(plan) == min(map(seconds, named))


@pytest.mark.parametrize(
    "recipe, expected",
    [
        ("auto", ["dp=4", "dp=2,tp=2"]),
        ("tp:tp", ["tp=4", "dp=2,tp=2"]),
        ("dp:ddp,tp:tp", ["dp=1,tp=4", "dp=2,tp=2", "dp=4,tp=1"]),
    ],
)
def test_meshes_that_a_recipe_leaves_open(recipe: RecipeLike, expected: list[str]) -> None:
    asked = Request(find_hardware("cpu-gloo"), ranks=4, recipe=recipe, offload=False)
    assert [str(mesh) for mesh in meshes(asked)] == expected


@pytest.mark.parametrize("recipe", ["ddp", "serve", {"x": "ddp"}, {"pp": "auto"}, {"dp": "ddp", "x": "tp"}])
def test_other_recipes_are_for_one_axis(recipe: RecipeLike) -> None:
    assert not leaves_mesh_open(recipe)


def test_meshes_without_a_plan_are_passed_over_unless_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(sizes: set[int]) -> Callable[..., Searched]:
        def search(prepared: Prepared, asked: Request, **given: Any) -> Searched:
            if asked.mesh is not None and len(asked.mesh.axes) in sizes:
                raise SearchError(f"No plan on {asked.mesh} fits.")
            return search_step(prepared, asked, **given)

        return search

    prepared = _wide()
    asked = Request(find_hardware("cpu-gloo"), ranks=4, offload=False)
    monkeypatch.setattr(plans, "search_step", failing({2}))
    assert str(plan_of(prepared, asked, {}).mesh) == "dp=4"
    monkeypatch.setattr(plans, "search_step", failing({1, 2}))
    with pytest.raises(SearchError, match="No plan on dp=4 fits"):
        plan_of(prepared, asked, {})
