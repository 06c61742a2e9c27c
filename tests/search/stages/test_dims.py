"""Tensor parallelism in two and three dims, chosen by the search where memory is tight."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_model import find_hardware
from autopar.ir import Graph, Mesh
from autopar.planning.planning import prepare_step
from autopar.search.candidates.outer import search_plan
from autopar.search.request.request import Request
from autopar.search.stages.dims import name_of, settings_in_dims, starts
from autopar.search.stages.given import Planned
from benchmarks.accuracy.tensor_dims import Layers, mean_square
from tests.search.graphs import LlamaSizes, llama
from tests.search.stacked import residual
from tests.support.tables import often

# One node of 64 devices with even links, whose host stores nothing.
EVEN = replace(find_hardware("h100"), devices_per_node=64, host=None, reserved_bytes=0)
SMALL = LlamaSizes(batch=4, seq=8, layers=1, dim=16, kv_heads=2, group=2, head_dim=4, ffn=32, vocab=64)
TWO, THREE = {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}


@functools.cache
def wide(batch: int, seq: int) -> Graph:
    """Two feed-forward layers of width 16,384 in bfloat16: two matrices of 2.1 GB each."""
    x = torch.empty(batch, seq, 16384, dtype=torch.bfloat16, device="meta")
    with torch.device("meta"):
        model = Layers(16384, 2).bfloat16()
    return prepare_step(model, (x,), loss_fn=mean_square).analysis.graph


def best(graph: Graph, **options: Any) -> Planned:
    return search_plan(graph, Request(EVEN, **{"recompute": "none", **options})).best


def test_settings_have_all_ranks_and_a_recipe_for_every_axis() -> None:
    found = list(settings_in_dims(16))
    assert {mesh.size for mesh, _ in found} == {16}
    assert all({*recipe} == {*mesh.names} for mesh, recipe in found)
    assert len(found) == 2 * (3 + 2 + 1)  # with 1, 2 and 4 ranks of dp, both recipes
    assert not list(settings_in_dims(2))


def test_axes_with_a_recipe_or_one_rank_are_no_start() -> None:
    mesh = Mesh.parse("dp=2,x=2,y=2,z=1")
    named = dict.fromkeys(mesh.names, "auto") | {"dp": "ddp"}
    found = list(starts(named, mesh))
    assert len(found) == 4 and {each["dp"] for each in found} == {"ddp"}
    assert {each["z"] for each in found} == {"auto"}


def test_the_names_of_rows() -> None:
    assert name_of(["columns", "zero3"]) == "2d" and name_of(["columns", "zero3", "ddp"]) == "2.5d"
    assert name_of(["tp+sp", "width", "zero3"]) == name_of(["width", "tp+sp"]) == "3d"


def test_with_tight_memory_a_plan_in_dims_is_chosen_by_its_price() -> None:
    """Under 3d, with one rank along z, each of 16 x 4 ranks keeps a block of all matrices and activations."""
    mesh = {"x": 16, "y": 4}
    named = best(wide(4, 2048), mesh=mesh, recipe={"x": "tp+sp", "y": "width"}, must_fit=False)
    bound = int(named.price.peak_bytes)
    tight, loose = (best(wide(4, 2048), mesh=mesh, memory_bytes=b) for b in (bound, 2 * bound))
    assert tight.price.peak_bytes <= bound and tight.plan.saved
    assert tight.plan.recipe == "x:tp+sp,y:width"
    assert loose.plan.recipe == "auto" and not loose.plan.saved
    (note,) = (note for note in tight.plan.notes if "memory is tight" in note)
    assert "over x=16,y=4 (3d) a rank keeps a block of every large matrix" in note


@pytest.mark.slow
def test_where_memory_is_tight_no_narrower_question_has_a_faster_answer() -> None:
    options: dict[str, Any] = {"ranks": 64, "stages": (1,), "memory_bytes": 800_000_000}
    found = best(wide(4, 2048), **options)
    assert not any("pipeline stages, which" in note for note in found.plan.notes)
    for narrower in ({"recipe": "dp:auto,tp:auto"}, {"mesh": "tp=16,tq=4", "ranks": None}):
        other = best(wide(4, 2048), **{**options, **narrower})
        assert found.price.step_seconds <= 1.0001 * other.price.step_seconds


GRAPHS = {"residual": residual(2), "llama": llama(SMALL)}


@pytest.mark.parametrize(
    ("is_tight", "mesh", "name", "model"),
    often(
        [
            (is_tight, mesh, name, model)
            for is_tight in (False, True)
            for mesh, name in ((TWO, "2d"), (THREE, "2.5d"), (THREE, "3d"))
            for model in GRAPHS
        ],
        [(False, TWO, "2d", "llama"), (True, TWO, "2d", "residual")],
    ),
)
def test_the_open_search_is_no_slower_than_what_is_named(
    is_tight: bool, mesh: dict[str, int], name: str, model: str
) -> None:
    graph = GRAPHS[model]
    named = best(graph, mesh=mesh, recipe={",".join(mesh): name}, must_fit=False)
    bound = int(named.price.peak_bytes) if is_tight else None
    found = best(graph, mesh=mesh, memory_bytes=bound)
    assert found.price.step_seconds <= 1.001 * named.price.step_seconds
