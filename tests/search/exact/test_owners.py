"""Owners: spread evenly, by recipe alone, and said in the plan."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from autopar.cost_model import find_hardware
from autopar.errors import RecipeError, SearchError
from autopar.ir import ANY, Mesh, O, ParameterPlan, Plan, R, V, format_place
from autopar.ir.note import kind_of
from autopar.pipeline.composed import step_of, stored_bytes
from autopar.pipeline.parts import block_starts
from autopar.pipeline.stage_costs import StageTables
from autopar.search.candidates.outer import search_plan
from autopar.search.exact.owners import with_owners
from autopar.search.exact.search import MeshSearch, search
from autopar.search.request.recipe_rows import STORED_ON_HOST
from autopar.search.request.recipes import resolve
from autopar.search.request.request import Request
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

GRAPH = residual(4, Sizes(batch=8, width=64, hidden=128, vocab=64))


def plan_of(recipe: object, **options: object) -> Plan:
    request = Request(TOY, mesh={"dp": 4}, recipe=recipe, **options)  # type: ignore[arg-type]
    return search_plan(GRAPH, request).best.plan


def test_data_parallel_stores_all_on_the_first_rank() -> None:
    plan = plan_of("data-parallel")
    assert {(how.storage, how.resident, how.reduce) for how in plan.parameters.values()} == {((O(0),), (V,), "step")}
    (note,) = [note for note in plan.notes if kind_of(note) == "owners"]
    assert note.startswith("along dp one rank stores and updates each parameter: ")
    assert note.endswith("on rank 0") and note.count("on rank") == 1


def test_a_parameter_server_spreads_bytes() -> None:
    plan = plan_of("parameter-server")
    owned = owned_bytes(plan)
    largest = max(size(name) for name in plan.parameters)
    assert len(owned) == 4 and max(owned.values()) - min(owned.values()) <= largest
    assert Plan.parse(str(plan)) == plan
    (note,) = [note for note in plan.notes if kind_of(note) == "owners"]
    assert all(f"on rank {rank}" in note for rank in range(4))


def test_an_owner_that_is_not_chosen_has_a_part_of_a_byte_until_then() -> None:
    """Of 3 ranks each counts a third of every parameter; in so few bytes a third of one is more than rounding."""
    graph = residual(2, Sizes(batch=12, width=8, hidden=16, vocab=8))
    plan = search_plan(graph, Request(TOY, mesh={"dp": 3}, recipe="parameter-server")).best.plan
    assert {how.storage[0].kind for how in plan.parameters.values()} == {"O"}


def size(name: str) -> int:
    tensor = GRAPH.tensors[GRAPH.parameters[name]]
    return tensor.itemsize_bytes * math.prod(tensor.shape)


def owned_bytes(plan: Plan) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, how in plan.parameters.items():
        owner = how.storage[0].owner
        found[owner] = found.get(owner, 0) + size(name)
    return found


def test_owners_are_given_by_bytes_the_largest_first() -> None:
    mesh = Mesh.of({"dp": 2})
    open_ = {name: ParameterPlan((O(ANY),), (V,)) for name in GRAPH.parameters}
    found = with_owners(GRAPH, open_, mesh, resolve("parameter-server", mesh))
    ordered = sorted(GRAPH.parameters, key=size, reverse=True)
    assert found[ordered[0]].storage == (O(0),) and found[ordered[1]].storage == (O(1),)


@pytest.mark.parametrize("recipe", ["data-parallel", "parameter-server"])
def test_owners_without_a_batch_that_can_be_shared_are_refused(recipe: str) -> None:
    graph = residual(2, Sizes(batch=1, width=64, hidden=128, vocab=64))
    with pytest.raises(SearchError, match=r"Put the samples into dim 0 .*, at least two of them"):
        search_plan(graph, Request(TOY, mesh={"dp": 4}, recipe=recipe))  # type: ignore[arg-type]


def test_what_has_no_owner_stays() -> None:
    kept = {name: ParameterPlan((R,), (V,)) for name in GRAPH.parameters}
    mesh = Mesh.of({"dp": 2})
    assert with_owners(GRAPH, kept, mesh, resolve("parameter-server", mesh)) == kept


def test_gradients_go_to_owners_once_a_step_and_that_does_not_go_with_zero2() -> None:
    with pytest.raises(RecipeError, match="data-parallel on dp reduces gradients once per step and zero2"):
        search_plan(GRAPH, Request(TOY, mesh={"dp": 2, "x": 2}, recipe={"dp": "data-parallel", "x": "zero2"}))


def test_auto_names_no_recipe_with_an_owner() -> None:
    open_axis = MeshSearch.of(GRAPH, {"dp": 4}, hardware=TOY)
    named = [row for _, each in open_axis.named() for row in each.problem.recipes]
    assert "zero1" in {row.name for row in named}
    assert all(row.owner is None for row in named)


HOSTED = replace(TOY, host=find_hardware("h100").host)


def on_host(recipe: str) -> Plan:
    """The plan of a recipe with owners, which store their parameters on the host."""
    return search(GRAPH, {"dp": 4}, hardware=HOSTED, recipe=recipe, tiers=(STORED_ON_HOST,))


@pytest.mark.parametrize("recipe", ["data-parallel", "parameter-server"])
def test_an_owner_on_the_host_keeps_four_copies_there_and_moves_its_parameters_twice(recipe: str) -> None:
    """Parameter, gradient and two moments; a parameter goes to the owner's device and its gradient comes back."""
    plan = on_host(recipe)
    assert Plan.parse(str(plan)) == plan
    assert {(how.tier, how.resident_tier) for how in plan.parameters.values()} == {("host", "device")}
    most = max(owned_bytes(plan).values())
    assert stored_bytes(GRAPH, plan, HOSTED, "host") == 4 * most
    moves = [i for i in step_of(GRAPH, plan, HOSTED).items if i.resource == "host"]
    assert sum(float(i.count * i.traffic_bytes) for i in moves) == 2 * most


def test_an_owner_on_the_host_keeps_a_copy_and_a_sum_of_gradients_on_the_device_like_others() -> None:
    step = step_of(GRAPH, on_host("data-parallel"), HOSTED)
    whole = sum(size(how) for how in GRAPH.parameters)
    assert [float(step.held(kind, "first")) for kind in ("parameters", "gradients", "optimizer")] == [whole, whole, 0]


def test_one_axis_has_owners_and_another_stores_on_the_host() -> None:
    request = Request(
        HOSTED, mesh={"dp": 2, "x": 2}, recipe={"dp": "data-parallel", "x": "zero3-offload"}, micro_batches=1
    )
    plan = search_plan(GRAPH, request).best.plan
    found = {format_place(how.storage, how.tier, plan.mesh) for how in plan.parameters.values()}
    assert {"O(0)@dp S(0)@x host"} <= found


@pytest.mark.parametrize("recipe", ["data-parallel", "parameter-server"])
def test_a_stage_is_priced_by_the_rank_that_owns_most_of_it(recipe: str) -> None:
    """Every rank has a copy and gradients of its stage's parameters, and the owner two moments of what it owns."""
    request = Request(TOY, mesh={"pp": 2, "dp": 2}, recipe={"dp": recipe}, micro_batches=2)
    plan = search_plan(GRAPH, request).best.plan
    assert plan.pipeline is not None
    starts = sorted(block_starts(GRAPH), key=[op.name for op in GRAPH.ops].index)
    table = StageTables(GRAPH, plan, TOY, starts=starts).at(plan.recompute)
    for begin, end in itertools.pairwise((0, *map(starts.index, plan.pipeline.cuts), len(starts))):
        ops = [op.name for op in GRAPH.ops]
        last = ops.index(starts[end]) if end < len(starts) else len(ops)
        used = {x for op in GRAPH.ops[ops.index(starts[begin]) : last] for x in op.operands}
        here = {name: how for name, how in plan.parameters.items() if GRAPH.parameters[name] in used}
        most = max(owned_bytes(replace(plan, parameters=here)).values())
        assert table.kept_bytes[begin, end] == 2 * sum(map(size, here)) + 2 * most


def test_owners_under_stages_that_are_asked_for() -> None:
    request = Request(TOY, ranks=4, recipe="parameter-server", batch=8, stages=2)
    plan = search_plan(GRAPH, request).best.plan
    assert plan.pipeline is not None and plan.pipeline.ranks == 2
    assert {state.kind for how in plan.parameters.values() for state in how.storage} == {"O"}


def test_owners_go_with_layers_that_run_again() -> None:
    plan = plan_of("parameter-server", recompute="full")
    assert plan.recompute != "none" and len(owned_bytes(plan)) == 4
