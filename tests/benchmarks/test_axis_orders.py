"""The lower bound of conversions whose tensors each have an order of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cost_model import find_hardware
from autopar.ir import Mesh
from autopar.planning.planning import prepare_step
from autopar.search.orders import in_order
from autopar.search.outer import search_plan
from autopar.search.request import Request
from benchmarks.accuracy.axis_orders import bound_of
from benchmarks.accuracy.tensor_dims import Layers, mean_square

HARDWARE = replace(find_hardware("cpu-gloo"), devices_per_node=8)


@pytest.fixture(scope="module")
def found():  # type: ignore[no-untyped-def]
    """The plan of 3d for axes whose order is the reverse of the recipe's, and its graph."""
    graph = prepare_step(
        Layers(64, 2), (torch.randn(8, 16, 64),), loss_fn=mean_square
    ).analysis.graph
    request = Request(
        HARDWARE, mesh=Mesh.of("z=2,y=2,x=2"), recipe="x,y,z:3d", recompute="none", refines=True
    )
    return graph, search_plan(graph, request).best.plan


def test_no_order_of_each_tensor_beats_the_order_that_was_chosen(found) -> None:  # type: ignore[no-untyped-def]
    graph, plan = found
    assert plan.mesh.names == ("x", "y", "z")
    bound = bound_of(graph, plan, HARDWARE)
    assert bound.seconds > 0 and bound.gaining == 0 and bound.gain == pytest.approx(0.0)


def test_conversions_take_longer_in_the_order_of_the_placement(found) -> None:  # type: ignore[no-untyped-def]
    """There some conversion has a detour, which the bound leaves out: so the bound can find a gain."""
    graph, plan = found
    chosen = bound_of(graph, plan, HARDWARE)
    placed = bound_of(graph, in_order(plan, plan.mesh.placed), HARDWARE)
    assert placed.gaining > 0 and placed.gain > 0
    assert placed.least_seconds == pytest.approx(chosen.seconds)
