"""The law of the search: by the price that is shown, nothing that a person can name is better."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.cost_model import Hardware, Link, find_hardware
from autopar.cost_model.items import FULL, MIXED_FLOAT32_GRADIENTS, TrainingState
from autopar.cost_model.machines.hardware import Host
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.errors import AutoparError
from autopar.ir import Graph, Plan
from autopar.pipeline.composed import Composed, composed
from autopar.search import search
from autopar.search.candidates.outer import search_plan
from autopar.search.exact.search import meshes_of
from autopar.search.request.request import Request
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from tests.search.graphs import LlamaSizes, llama
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

MACHINE = replace(TOY, host_seconds=2e-6, reserved_bytes=500, memory_efficiency=0.5)
HIDING = Software(hides=0.8, hides_activations=0.2, host_seconds=1e-6)
SMALL = LlamaSizes(batch=4, seq=8, layers=1, dim=16, kv_heads=2, group=2, head_dim=4, ffn=32, vocab=64)
ROWS = ("ddp", "zero1", "zero2", "zero3", "tp", "tp+sp", "ep", "auto")
TOLERANCE = 1.001


def price(
    graph: Graph,
    mesh: dict[str, int],
    recipe: str,
    bound: int | None = None,
    *,
    hardware: Hardware = MACHINE,
    software: Software = AUTOPAR,
    state: TrainingState = FULL,
) -> Composed | None:
    """The composed price of what a recipe leads to; None where it has no plan that fits."""
    settings = {"software": software, "training_state": state}
    try:
        plan = search(
            graph,
            mesh,
            hardware=hardware,
            recipe=recipe,
            memory_bytes=bound,
            micro_batches=2,
            **settings,  # type: ignore[arg-type]
        )
    except AutoparError:
        return None
    found = composed(graph, plan, hardware, **settings)  # type: ignore[arg-type]
    assert bound is None or found.peak_bytes <= bound
    return found


@pytest.mark.parametrize("software", [AUTOPAR, HIDING])
@pytest.mark.parametrize("graph", [residual(2), llama(SMALL)])
def test_no_recipe_on_one_axis_is_faster_than_the_open_search(graph: Graph, software: Software) -> None:
    named = [price(graph, {"x": 2}, row, software=software) for row in ROWS]
    best = price(graph, {"x": 2}, "auto", software=software)
    assert best is not None
    for row, found in zip(ROWS, named, strict=True):
        assert found is None or best.step_seconds <= TOLERANCE * found.step_seconds, row


def ops_of(graph: Graph, plan: Plan) -> float:
    """Ops of a step, each as often as its launch is priced."""
    slow, fast = (composed(graph, plan, replace(TOY, launch_seconds=launch)).step_seconds for launch in (1.0, 0.0))
    return slow - fast


@pytest.mark.parametrize("graph", [residual(2), llama(SMALL)])
def test_the_longer_an_op_takes_to_issue_the_fewer_ops_a_plan_has(graph: Graph) -> None:
    """The fastest plan of two prices S + n L: what a plan with more ops saves beside them pays only for a short L."""
    counts = []
    for launch in (1e-9, 1e-7, 1e-6, 1e-5, 1e-3):
        machine = replace(TOY, launch_seconds=launch, host_seconds=launch, update_seconds=launch)
        counts.append(ops_of(graph, search(graph, {"x": 2}, hardware=machine)))
    assert counts[0] > counts[-1]
    assert all(later <= TOLERANCE * earlier for earlier, later in itertools.pairwise(counts)), counts


def test_no_pair_of_recipes_is_faster_than_the_open_search() -> None:
    graph, mesh = residual(2), {"x": 2, "y": 2}
    best = price(graph, mesh, "auto", state=MIXED_FLOAT32_GRADIENTS)
    assert best is not None
    for rows in itertools.product(("ddp", "zero2", "zero3", "tp", "tp+sp"), repeat=2):
        found = price(graph, mesh, "x:{},y:{}".format(*rows), state=MIXED_FLOAT32_GRADIENTS)
        assert found is None or best.step_seconds <= TOLERANCE * found.step_seconds, rows


def test_hybrid_sharding_is_not_faster_than_the_open_search() -> None:
    """Gathers take about as long as what hides them; the open answer was 34 % slower than `ddp` beside `zero3`."""
    graph, mesh = residual(2, Sizes(batch=128, width=64, hidden=128, vocab=64)), {"dp": 2, "dp_inner": 2}
    figures = {"peak_flops": ((8, 6e8),), "inside_node": Link(2e7, 1e-8), "across_nodes": Link(1e7, 1e-7)}
    hardware = replace(MACHINE, devices_per_node=2, memory_efficiency=1.0, **figures)
    software = Software(hides=1.0, host_seconds=1e-8)
    best, named = (
        price(graph, mesh, r, hardware=hardware, software=software) for r in ("auto", "dp:ddp,dp_inner:zero3")
    )
    assert best is not None and named is not None
    assert best.step_seconds <= named.step_seconds


@pytest.mark.parametrize(
    ("graph", "mesh", "flops", "inside", "across", "hides", "recipe"),
    [
        (
            llama(replace(SMALL, batch=8, seq=16, dim=32)),
            {"dp": 2, "tp": 2},
            1.5e9,
            Link(1.7e7, 1.6e-7),
            Link(5e6, 2e-7),
            0.8,
            "dp:zero1,tp:auto",
        ),
        (
            residual(2, Sizes(batch=64, width=64, hidden=64, vocab=256)),
            {"dp": 4, "tp": 2},
            1.5e9,
            Link(2.3e8, 4.5e-8),
            Link(1.2e8, 1.3e-8),
            1.0,
            "dp:zero3,tp:auto",
        ),
    ],
)
def test_a_recipe_on_one_of_two_axes_is_not_faster_than_the_open_search(
    graph: Graph, mesh: dict[str, int], flops: float, inside: Link, across: Link, hides: float, recipe: str
) -> None:
    """The open answers were 2.6 and 8.9 % slower: each step hides so much that slopes turn the storage at once."""
    figures = {"peak_flops": ((8, flops),), "inside_node": inside, "across_nodes": across}
    hardware = replace(MACHINE, memory_efficiency=1.0, devices_per_node=8 // mesh["dp"], **figures)
    software = Software(hides=hides, hides_activations=0.2, host_seconds=1e-8)
    best, named = (price(graph, mesh, r, hardware=hardware, software=software) for r in ("auto", recipe))
    assert best is not None and named is not None
    assert best.step_seconds <= TOLERANCE * named.step_seconds


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("software", [AUTOPAR, HIDING])
def test_no_recipe_of_a_stage_is_faster_than_the_open_search(software: Software, micro_batches: int) -> None:
    graph, mesh = residual(4), {"pp": 2, "x": 2}
    request = Request(MACHINE, mesh=mesh, software=software, micro_batches=micro_batches)
    rows = ("ddp", "zero1", "zero2", "zero3", "auto")
    requests = [request.but(recipe=f"x:{row}") for row in rows]
    named = [search_pipeline(Case(graph, each, micro_batches)).best.seconds for each in requests]
    assert named[-1] <= TOLERANCE * min(named)


@pytest.mark.parametrize("pin", ["S(0)@x", "R@x"])
def test_a_pin_rules_recipes_out_and_not_the_plan_of_a_stage(pin: str) -> None:
    """ddp stores parameters whole and zero3 in shards: each of the pins excludes one of them."""
    request = Request(MACHINE, mesh={"pp": 2, "x": 2}, micro_batches=4, pins={"embed.weight": pin})
    found = search_pipeline(Case(residual(4), request, 4))
    stored = found.plan.parameters["embed.weight"].storage
    assert str(stored[0]) == pin.removesuffix("@x")


@pytest.mark.parametrize("graph", [residual(2), llama(SMALL)])
def test_a_plan_fits_whenever_one_under_a_recipe_does(graph: Graph) -> None:
    """At the peak of every recipe's plan the open search has a plan, and one that is no slower."""
    seconds = []
    sizes = sorted({r.peak_bytes for row in ROWS if (r := price(graph, {"x": 4}, row))})
    for size in sizes:
        found = price(graph, {"x": 4}, "auto", bound=int(size))
        assert found is not None, size
        seconds.append(found.step_seconds)
    for less, more in itertools.pairwise(seconds):
        assert more <= TOLERANCE * less


def test_no_mesh_with_an_axis_that_splits_nothing_is_faster() -> None:
    """Two stages took 15 times the step of one rank, where a message takes longer than the whole step."""
    graph, request = residual(2), Request(find_hardware("cpu-gloo"), ranks=4)
    named = [search_plan(graph, request.but(mesh=mesh)).best.price for mesh in meshes_of(4)]
    best = search_plan(graph, request).best.price.step_seconds
    assert best <= TOLERANCE * min(each.step_seconds for each in named)


@pytest.mark.parametrize(("ranks", "mesh"), [(4, "dp=2,tp=2"), pytest.param(8, "a=2,b=2,c=2", marks=pytest.mark.slow)])
def test_no_mesh_on_which_single_ops_are_split_is_faster(ranks: int, mesh: str) -> None:
    """The embedding is split over some ranks and all else is repeated, which no recipe and so no estimate knows.

    Links of 10 us made the open answer 10 % slower than the mesh of two axes, and 13 % than that of three.
    """
    gloo = find_hardware("cpu-gloo")
    near, far = (replace(link, latency_seconds=1e-5) for link in (gloo.inside_node, gloo.across_nodes))
    hardware = replace(gloo, inside_node=near, across_nodes=far)
    graph = residual(2, Sizes(batch=8, width=128, hidden=64, vocab=1024))
    request = Request(hardware, ranks=ranks)
    named = search_plan(graph, request.but(mesh=mesh)).best.price.step_seconds
    assert search_plan(graph, request).best.price.step_seconds <= TOLERANCE * named


@pytest.mark.parametrize("update_bytes_per_second", [1e9, 1e7])
def test_memory_is_never_slower_where_the_host_takes_parameters(update_bytes_per_second: float) -> None:
    """Twelve bounds, in equal ratios, from the least bytes that all on the device take down to a third of them."""
    host = Host(10**9, 1e9, 1e-6, update_bytes_per_second)
    request = Request(replace(TOY, host=host), ranks=1)
    loose = search_plan(residual(2), request.but(memory_bytes=10**9)).best.price.peak_bytes
    bounds = [int(1.01 * loose * 0.3 ** (i / 11)) for i in range(12)]
    found = [search_plan(residual(2), request.but(memory_bytes=b)).best for b in bounds]
    assert all(e.price.peak_bytes <= b for e, b in zip(found, bounds, strict=True))
    far = [sum(how.tier == "host" for how in e.plan.parameters.values()) for e in found]
    assert far[0] == 0 < far[-1] and far == sorted(far)
    seconds = [each.price.step_seconds for each in found]
    assert all(more <= TOLERANCE * less for more, less in itertools.pairwise(seconds))


def test_more_memory_is_not_slower_where_all_communication_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if buckets were so small that even the last one hid."""
    monkeypatch.setattr("autopar.cost_model.buckets.hidden_part", lambda buckets: 1.0)
    graph = residual(2, Sizes(batch=4, width=64, hidden=64, vocab=2048))
    software, hardware = (replace(HIDING, hides=1.0, host_seconds=1e-8), replace(MACHINE, memory_efficiency=1.0))
    loose = price(graph, {"x": 2, "y": 2}, "auto", software=software, hardware=hardware)
    assert loose is not None
    bounds = [int(part * loose.peak_bytes) for part in (0.7, 0.8)]
    tight, wider = (
        price(graph, {"x": 2, "y": 2}, "auto", bound, software=software, hardware=hardware) for bound in bounds
    )
    assert tight is not None and wider is not None
    assert wider.step_seconds <= TOLERANCE * tight.step_seconds
