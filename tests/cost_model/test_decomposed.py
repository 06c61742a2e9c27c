"""What decomposed collectives hide, and that the price decomposes what the graph does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import find_cluster, find_hardware
from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.cost_model.machines.software import Software
from autopar.errors import AutoparError
from autopar.ir import Graph, Mesh, Plan
from autopar.ops.decomposed import gather_products, product_scatter
from autopar.passes import decompose_products
from autopar.pipeline.composed import composed, step_of
from autopar.pipeline.stage_costs import StageTables
from autopar.planning.planning import Prepared, prepare_step, search_step
from autopar.program.program import build_program
from autopar.program.slices import gathered_again
from autopar.proof.random_plan import random_plan
from autopar.search.request.request import Request
from tests.runtime.models import make
from tests.support.staged import prepared_once

CLUSTER = find_cluster("h100x4")
RANKS = 4


class Two(nn.Module):
    """Two products, whose rows are gathered for the first and scattered after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return (x + self.down(self.up(x).relu())).square().mean()


def explained(decompose: str, recipe: str = "tp+sp") -> autopar.Explanation:
    with torch.device("meta"):
        model, x = Two(), torch.empty(8, 256, 512)
    return autopar.explain(model, (x,), mesh={"x": RANKS}, cluster=CLUSTER, recipe=recipe, decompose=decompose)


def items_of(found: autopar.Explanation) -> list[WorkItem]:
    return list(step_of(found.graph, found.plan, CLUSTER.hardware).items)


def test_what_a_plan_hides_is_what_its_products_leave() -> None:
    """n = 4 pieces: the smaller of T and C - C / n; in the backward of the gather C - C / 2n."""
    items = items_of(explained("x"))
    parts = {"forward": 0.0, "backward": 0.0}
    for item in items:
        if item.resource == COMPUTE and item.kind == "aten.linear" and item.phase in parts:
            parts[item.phase] = item.count * item.seconds  # both have the same size
    assert parts["backward"] == pytest.approx(2 * parts["forward"], rel=1e-6)
    found = {(i.kind, i.phase): i for i in items if i.hidden_seconds}
    assert {key: float(i.hidden_seconds) for key, i in found.items()} == pytest.approx(
        {
            ("all_gather", "forward"): min(found["all_gather", "forward"].seconds, parts["forward"] * 3 / 4),
            ("reduce_scatter", "backward"): min(found["reduce_scatter", "backward"].seconds, parts["backward"] * 7 / 8),
            ("reduce_scatter", "forward"): min(found["reduce_scatter", "forward"].seconds, parts["forward"] * 3 / 4),
            ("all_gather", "backward"): min(found["all_gather", "backward"].seconds, parts["backward"] * 3 / 4),
        }
    )


def test_the_composed_step_is_shorter_by_what_is_hidden() -> None:
    plain, pieces = explained(""), explained("x")
    hidden = sum(float(i.count * i.hidden_seconds) for i in items_of(pieces))
    added = sum(float(i.count * i.seconds) for i in items_of(pieces) if i.name.endswith("added up"))
    assert hidden > added > 0
    assert pieces.time.value == pytest.approx(plain.time.value - hidden + added, rel=1e-9)


def test_sums_of_pieces_are_read_and_written() -> None:
    """Rows of the second product are scattered: backward adds up the gradient of its weight (2048 x 512 / 4 numbers).

    3 more pieces; for each, the sum is read and written, and the piece written and read: 4 times 4 bytes a number.
    """
    (added,) = (i for i in items_of(explained("x")) if i.name.endswith("added up"))
    assert (added.phase, added.resource) == ("backward", COMPUTE)
    assert added.traffic_bytes == 3 * 4 * 4 * (2048 // 4 * 512)


def panels() -> autopar.Explanation:
    """Two layers over 4 x 2 ranks under SUMMA, in pieces along x."""
    layers = [nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)]
    return autopar.explain(
        nn.Sequential(*layers),
        (torch.ones(8, 4, 64),),
        loss_fn=lambda y: y.square().mean(),
        mesh={"x": 4, "y": 2},
        cluster="h100x8",
        recipe={"x,y": "2d"},
        decompose="x",
    )


def test_a_slice_that_comes_back_in_panels_takes_two_of_them() -> None:
    """Of x in S(2)@x a rank keeps its own piece; in backward it has one panel and the next, not all of x."""
    found = panels()
    whole = replace(found.plan, decomposed=())
    back = {
        plan.decomposed: {
            each.of: float(each.bytes)
            for each in step_of(found.graph, plan, CLUSTER.hardware).holdings
            if each.kind == "recomputed"
        }
        for plan in (found.plan, whole)
    }
    assert back[()]["linear_2"] == 8 * 4 * 64 * 4 // 2  # the whole operand of a rank: y splits the batch
    assert back["x",]["linear_2"] == back[()]["linear_2"] / 2


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_table_of_stages_prices_a_decomposed_step_of_a_slow_host_as_the_step_does(runs_ahead: bool) -> None:
    """The host must also issue what pieces hide: without that, the table was below the step."""
    found, software = explained("x"), Software(hides=0.7, runs_ahead=runs_ahead)
    for host_seconds in (0.0, 3e-5, 3e-4):
        hardware = replace(CLUSTER.hardware, host_seconds=host_seconds)
        step = composed(found.graph, found.plan, hardware, software=software)
        table = StageTables(found.graph, found.plan, hardware, world=found.plan.mesh, software=software).at(
            found.plan.recompute
        )
        one = table.stage(0, table.blocks)
        each = one.forward_seconds + one.backward_seconds
        seconds = found.plan.micro_batches * each + float(table.once_seconds[0, -1])
        assert seconds + software.step_seconds == pytest.approx(step.step_seconds, rel=1e-9)


def test_a_plan_says_where_there_is_nothing_to_decompose() -> None:
    """Under tp the rows are summed by all-reduces, which have no pieces."""
    (note,) = (str(n) for n in explained("x", "tp").plan.notes if n.startswith("Along x "))
    assert note.startswith("Along x nothing is decomposed: no all-gather is read only by linear layers")
    (other,) = (n for n in explained("x").plan.notes if n.startswith("Along x "))
    assert other.startswith("Along x products are computed in pieces")


def test_auto_leaves_stages_alone_where_nothing_hides() -> None:
    """On a machine without a time to launch kernels, which the search of stages adds to its own price.

    The schedule is named: of a plan in pieces a zero-bubble schedule runs the backward whole, which has another price.
    """
    layers = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
    prepared = prepare_step(nn.Sequential(*layers), (torch.ones(2, 4, 16),), {}, loss_fn=torch.mean)
    request = Request(
        find_hardware("cpu-gloo"),
        mesh=Mesh.parse("pp=2,x=2"),
        recipe="x:ddp",
        micro_batches=2,
        decompose=("auto",),
        schedule="1f1b",
    )
    assert search_step(prepared, request).best.plan.decomposed == ()


def test_auto_decomposes_where_that_is_faster() -> None:
    assert explained("auto").plan.decomposed == ("x",)


def test_meshes_without_the_axis_are_searched_too() -> None:
    """Nobody names a mesh; of those that the search tries some have no axis tp."""
    with torch.device("meta"):
        model, x = Two(), torch.empty(8, 256, 512)
    request = Request.on(CLUSTER, recipe="zero3-offload", decompose=("tp",))
    plan = search_step(prepare_step(model, (x,)), request).best.plan
    assert plan.decomposed == tuple(axis for axis in plan.mesh.names if axis == "tp")


def test_unknown_axes_are_refused() -> None:
    with pytest.raises(AutoparError, match="decompose names 'y', no axis of a stage: name each of x at most once"):
        explained("y")


def decomposed_calls(prepared: Prepared, plan: Plan) -> int:
    """Number of decomposed calls in the graph of a rank."""
    found = build_program(prepared.captured, prepared.analysis, plan)
    names = {axis: axis for axis in plan.mesh.names}
    decompose_products(
        found.module,
        gather_products,
        product_scatter,
        groups=plan.decomposed,
        restored=gathered_again(found.slices, plan, names),
    )
    calls = found.module.graph.nodes
    return sum(node.target in (gather_products, product_scatter) for node in calls)


def priced_calls(graph: Graph, plan: Plan) -> int:
    """Number of conversions whose forward hides something."""
    items = step_of(graph, plan, CLUSTER.hardware).items
    return sum(bool(i.hidden_seconds) for i in items if i.phase == "forward")


def test_the_graph_and_the_price_decompose_the_same_conversions() -> None:
    model, batch, loss_fn = make("gpt")
    prepared = prepared_once(model, batch, loss_fn)
    graph, total = prepared.analysis.graph, 0
    for seed in range(40):
        mesh = Mesh.of({"a": 2, "b": 2})
        drawn = random_plan(graph, mesh, seed=seed, fingerprint=prepared.captured.fingerprint, lone_ops=False)
        plan = replace(drawn, pipeline=None, decomposed=mesh.names)
        assert decomposed_calls(prepared, plan) == priced_calls(graph, plan), seed
        total += priced_calls(graph, plan)
    assert total > 5
