"""The order in which the axes of a mesh nest, as a choice of the search."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model import find_hardware
from autopar.ir import Graph, Mesh, Plan
from autopar.pipeline.composed import composed
from autopar.planning.planning import prepare_step
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.request_filters import stays_inside
from autopar.search.refine.orders import best_order, in_order, orders_of, shares_a_factor
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from benchmarks.accuracy.tensor_dims import Layers, mean_square

HARDWARE = replace(find_hardware("cpu-gloo"), devices_per_node=8)
PLACED, NESTED = "z=2,y=2,x=2", "z=2,y=2,x=2 order x,y,z"
IN_DIMS = {"x,y,z": "3d"}


@functools.cache
def graph() -> Graph:
    """Two feed-forward layers of width 64."""
    x = torch.randn(8, 16, 64)
    return prepare_step(Layers(64, 2), (x,), loss_fn=mean_square).analysis.graph


def best(mesh: Mesh | str, recipe: Any = "auto", **options: Any) -> Planned:
    asked = {"recompute": "none", "refines": True, **options}
    return search_plan(graph(), Request(HARDWARE, mesh=Mesh.of(mesh), recipe=recipe, **asked)).best


def seconds(plan: Plan) -> float:
    return composed(graph(), plan, HARDWARE).step_seconds


def test_a_plan_and_back_again() -> None:
    plan = best(PLACED, IN_DIMS, refines=False).plan
    turned = in_order(plan, Mesh.parse(NESTED))
    assert in_order(turned, plan.mesh) == plan
    assert Plan.parse(str(turned)) == turned
    weight, other = (each.parameters["layers.0.up.weight"].storage for each in (plan, turned))
    assert weight == other[::-1]


def test_every_other_order_is_compared() -> None:
    plan = replace(best(PLACED, IN_DIMS, refines=False).plan, saved={})
    assert len({each.mesh for each in orders_of(graph(), plan)} | {plan.mesh}) == 6


def test_the_order_of_3d_is_found_whatever_the_placement() -> None:
    """In the order x, y, z no axis leaves a factor that a later one splits, so that no parts change places."""
    named, found = best(PLACED, IN_DIMS, refines=False), best(PLACED, IN_DIMS)
    assert str(found.plan.mesh) == NESTED
    assert found.price.step_seconds < named.price.step_seconds
    (note,) = (note for note in found.plan.notes if "nest in the order x, y, z" in note)
    assert "the ranks are placed as z=2,y=2,x=2" in note


def test_an_order_that_is_named_is_kept() -> None:
    asked = "z=2,y=2,x=2 order y,z,x"
    assert str(best(asked, IN_DIMS).plan.mesh) == asked


@pytest.mark.parametrize("recipe", ["auto", {"x,y,z": "2.5d"}, {"z": "zero3", "x": "tp+sp"}])
def test_no_order_is_slower_than_the_placement(recipe: Any) -> None:
    named, found = best(PLACED, recipe, refines=False), best(PLACED, recipe)
    assert found.price.step_seconds <= named.price.step_seconds


def test_no_order_of_the_same_choices_is_faster() -> None:
    plan = replace(best(PLACED, IN_DIMS).plan, saved={})
    assert all(seconds(each) >= 0.999 * seconds(plan) for each in orders_of(graph(), plan))


def test_nothing_is_compared_where_axes_split_different_dims() -> None:
    found = best("dp=2,tp=2", {"dp": "ddp", "tp": "tp"})
    assert not shares_a_factor(graph(), found.plan)
    assert best_order(found, Request(HARDWARE, mesh=found.plan.mesh)) is None
    assert found.plan.mesh == Mesh.parse("dp=2,tp=2")


def test_an_axis_stays_inside_a_node_by_its_placement():
    asked = Request(HARDWARE, inside_node=("tp",))
    assert stays_inside(asked, Mesh.parse("dp=2,tp=4 order tp,dp"), devices_per_node=4)
    assert not stays_inside(asked, Mesh.parse("tp=4,dp=2 order dp,tp"), devices_per_node=4)
