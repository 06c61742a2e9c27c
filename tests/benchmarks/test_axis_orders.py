"""The lower bound of conversions whose tensors each have an order of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost_model import find_hardware
from autopar.ir import Mesh
from autopar.planning.planning import prepare_step
from autopar.search.candidates.outer import search_plan
from autopar.search.refine.orders import in_mesh_order, in_order
from autopar.search.request.request import Request
from benchmarks.accuracy.axis_orders import least_seconds, own_seconds
from benchmarks.accuracy.tensor_dims import Layers, mean_square

HARDWARE = replace(find_hardware("cpu-gloo"), devices_per_node=8)


@pytest.fixture(scope="module")
def found():  # type: ignore[no-untyped-def]
    """The plan of 3d for axes whose order is the reverse of the recipe's, and its graph."""
    graph = prepare_step(Layers(64, 2), (torch.randn(8, 16, 64),), loss_fn=mean_square).analysis.graph
    request = Request(HARDWARE, mesh=Mesh.of("z=2,y=2,x=2"), recipe="x,y,z:3d", recompute="none", refines=True)
    return graph, search_plan(graph, request).best.plan


def test_the_orders_of_a_plan_reach_the_lower_bound(found) -> None:  # type: ignore[no-untyped-def]
    graph, plan = found
    least = least_seconds(graph, plan, HARDWARE)
    assert 0 < least == pytest.approx(own_seconds(graph, plan, HARDWARE))


def test_conversions_take_longer_as_the_axes_are_named(found) -> None:  # type: ignore[no-untyped-def]
    """There some conversion has a detour, which the bound leaves out."""
    graph, plan = found
    named = in_order(in_mesh_order(plan), plan.mesh.placed)
    assert own_seconds(graph, named, HARDWARE) > 1.01 * own_seconds(graph, plan, HARDWARE)
    assert least_seconds(graph, named, HARDWARE) == pytest.approx(least_seconds(graph, plan, HARDWARE))
