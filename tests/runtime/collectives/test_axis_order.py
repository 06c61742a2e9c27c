"""Meshes whose axes nest in another order than their ranks are placed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.errors import MeshError
from autopar.ir import Mesh
from autopar.runtime.ranks.processes import axes_of_device_mesh, make_world
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make_on
from tests.runtime.training import difference, single, train
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

ORDERED = "dp=2,tp=2 order tp,dp"
RECIPE = {"dp": "zero3", "tp": "tp"}


@captured_once()
def on_ranks(mesh: Any, pins: dict[str, str]) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """The plan, the place of this rank in its device mesh, and what training gets."""
    model, batch, loss_fn = make_on("cpu", "mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=RECIPE, example_inputs=batch, pins=pins)
    parameter = next(made.parameters())
    place = parameter.device_mesh.get_coordinate()
    return str(made.plan), tuple(place), train(made, made.step, batch)


def test_ranks_of_an_ordered_mesh_train_as_one_process(four_ranks: Ranks) -> None:
    """Both axes split the rows of the first weight, and tp is the major one although its ranks are neighbours."""
    expected = single("mlp")
    pins = {"up.weight": "S(0)@dp"}
    for rank, (plan, place, found) in enumerate(four_ranks.run(on_ranks, ORDERED, pins)):
        assert f"mesh {ORDERED}" in plan
        assert "parameter up.weight: S(0)@tp S(0)@dp | S(0)@tp" in plan
        assert place == (rank % 2, rank // 2)  # positions along tp, dp
        assert difference(found, expected) < 1e-9


def device_mesh_of_its_own() -> tuple[str, str]:
    ranks = torch.arange(4).view(2, 2).T
    turned = DeviceMesh("cpu", ranks, mesh_dim_names=("tp", "dp"))
    return str(axes_of_device_mesh(turned)), on_ranks(turned, {})[0]


def test_a_device_mesh_tells_its_order_and_its_placement(four_ranks: Ranks) -> None:
    for axes, plan in four_ranks.run(device_mesh_of_its_own):
        assert axes == ORDERED and f"mesh {ORDERED}" in plan


def made_and_read_back(text: str) -> str:
    made = make_world(Mesh.parse(text), torch.device("cpu"), None)
    assert made.device_mesh is not None
    assert made.rank == dist.get_rank() % made.mesh.size  # in the mesh of a stage
    return str(axes_of_device_mesh(made.device_mesh))


@pytest.mark.parametrize(
    "text", ["a=2,b=2", "a=1,b=4", "a=2,b=1,c=2", "a=2,b=2 order b,a", "pp=2,a=2,b=1 order pp,b,a", "a=1,b=4 order b,a"]
)
def test_a_device_mesh_reads_back(four_ranks: Ranks, text: str) -> None:
    mesh = Mesh.parse(text).without_axis("pp") or Mesh.parse(text)
    for found in four_ranks.run(made_and_read_back, text):
        assert Mesh.parse(found).used == mesh.used
        assert found == str(mesh) or mesh.placement


def uneven() -> str:
    try:
        axes_of_device_mesh(DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("a", "b")))
    except MeshError as error:
        return str(error)
    return ""


def test_ranks_in_no_order_are_refused(four_ranks: Ranks) -> None:
    for said in four_ranks.run(uneven):
        assert "[0, 1, 3, 2]: along an axis their numbers are not equally spaced" in said


def with_a_copied_layer(mesh: Any, is_early: bool) -> tuple[str, float]:
    """The plan and the loss of a model whose layer becomes a copy, made before the plan or after it."""
    model, batch, loss_fn = make_on("cpu", "mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=mesh, recipe=RECIPE, pins={"up.weight": "S(0)@dp"})
    early = copy.deepcopy(model.up)
    made.step(*batch)
    model.up = early if is_early else copy.deepcopy(model.up)
    return str(made.plan), made.step(*batch).item()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_layer_is_replaced_by_its_copy_in_an_order_of_the_search(four_ranks: Ranks, is_early: bool) -> None:
    expected = single("mlp", steps=1)["losses"][0]
    for plan, loss in four_ranks.run(with_a_copied_layer, {"dp": 2, "tp": 2}, is_early):
        assert f"mesh {ORDERED}" in plan and abs(loss - expected) < 1e-9


def sharded_and_compiled(cut: Any, given: Any) -> dict[str, Any]:
    """Training under the backend, with parameters cut over one mesh and another text of it as an option."""
    model, batch, loss_fn = make_on("cpu", "mlp")
    autopar.shard_(model, {"dp": "zero3", "tp": "zero3"}, mesh=cut)
    torch.compiler.reset()
    call = torch.compile(model, backend="autopar", options={"mesh": given})

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(call(x), target)  # type: ignore[operator]
        loss.backward()
        return loss.detach()

    return train(model, step, batch)


ONE_OF_ONE = "dp=2,z=1,tp=2 order tp,z,dp"


@pytest.mark.parametrize(
    ("cut", "given"),
    [(ORDERED, {"dp": 2, "tp": 2}), ({"dp": 1, "tp": 4}, {"dp": 1, "tp": 4}), (ONE_OF_ONE, ONE_OF_ONE)],
    ids=str,
)
def test_shards_on_ordered_meshes_and_beside_axes_of_one_rank(four_ranks: Ranks, cut: Any, given: Any) -> None:
    expected = single("mlp")
    for found in four_ranks.run(sharded_and_compiled, cut, given):
        assert difference(found, expected) < 1e-9


def of_two_orders() -> tuple[list[str], dict[str, Any]]:
    """What is said where a mesh names another order than a plan, and training with the plan on a mesh without one."""
    model, batch, loss_fn = make_on("cpu", "mlp")
    plan = autopar.explain(model, batch, loss_fn=loss_fn, mesh=ORDERED, recipe=RECIPE).plan
    said = []
    for refused in ("tp=2,dp=2", "tp=2,dp=2 order dp,tp"):
        with pytest.raises(MeshError) as error:
            autopar.compile(model, loss_fn=loss_fn, plan=plan, mesh=refused)
        said.append(str(error.value))
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan, mesh={"dp": 2, "tp": 2})
    return said, train(made, made.step, batch)


def test_a_plan_keeps_its_order_on_a_mesh_that_names_none(four_ranks: Ranks) -> None:
    for said, found in four_ranks.run(of_two_orders):
        assert all(f"The plan was made for the mesh {ORDERED}, but" in each for each in said)
        assert difference(found, single("mlp")) < 1e-9
