"""Storage on the host: when the search takes it, what it says, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest

from autopar.cost_model.machines.hardware import Disk, Host
from autopar.errors import RecipeError, SearchError
from autopar.ir import Plan
from autopar.ir.note import kind_of
from autopar.pipeline.composed import composed, step_of, stored_bytes
from autopar.search.candidates.outer import search_plan
from autopar.search.candidates.settings import ClusterSetting, PricedCandidate
from autopar.search.candidates.trials import moved_seconds, promising
from autopar.search.request.request import Request
from autopar.search.stages import pipeline
from autopar.search.stages.case import Case
from autopar.search.stages.given import Planned
from autopar.search.stages.staged import StagedPlan
from tests.search.stacked import Sizes, residual
from tests.search.toy import TOY

GRAPH = residual(6, Sizes(batch=4, width=64, hidden=128, vocab=64))
HOST = Host(10**9, bandwidth_bytes_per_second=1e9, latency_seconds=1e-6, update_bytes_per_second=1e9)
WITH_HOST = dataclasses.replace(TOY, host=HOST)


@functools.cache
def planned(memory_bytes: int, ranks: int = 1, **options: object) -> Planned:
    request = Request(WITH_HOST, ranks=ranks, memory_bytes=memory_bytes, **options)  # type: ignore[arg-type]
    return search_plan(GRAPH, request).best


def is_far(found: Planned) -> bool:
    return any(how.tier == "host" for how in found.plan.parameters.values())


def least_near() -> int:
    """The least memory that a plan takes without the host, to a hundredth."""
    low, high = 1, 10**8
    while high - low > low // 100 + 1:
        middle = (low + high) // 2
        try:
            planned(middle, offload=False)
            high = middle
        except SearchError:
            low = middle
    return high


def test_the_host_is_dropped_as_memory_grows_and_memory_never_makes_a_plan_slower() -> None:
    """Where a plan barely fits without the host, it recomputes more than the moves take, and the host stays."""
    ladder = [planned(int(least_near() * share)) for share in (0.5, 0.8, 0.98, 1.0, 1.2, 2.0, 10.0)]
    far, seconds = [is_far(each) for each in ladder], [e.price.step_seconds for e in ladder]
    assert far[:3] == [True] * 3 and not far[-1] and far == sorted(far, reverse=True)
    assert seconds == sorted(seconds, reverse=True)


def test_settings_that_fit_with_the_host_alone_come_by_their_seconds() -> None:
    """A link of 50 GB/s moves 25 GB in half a second; without the host the smaller setting is first."""
    slow = ClusterSetting(2, 8, 1, 1, 8, "zero3", "tp+sp", "full")
    fast = ClusterSetting(16, 1, 1, 1, 1, "zero3", "tp", "full")
    estimates = [PricedCandidate(slow, 20.0, 84e9, 0.0), PricedCandidate(fast, 10.0, 101e9, 0.0)]
    host = Host(10**12, 50e9, 1e-5, 10e9)
    machine = dataclasses.replace(TOY, host=host, memory_bytes=80 * 10**9)
    asked = Request(machine, ranks=16, headroom=0.05)
    near, far = (
        [trial.promise_seconds for trial in promising(estimates, asked.but(offload=how), 1)] for how in (False, True)
    )
    assert near == [20.0, 10.0] and far == [10.5, 20.0 + 8 / 50]


def test_the_host_stores_no_activations_of_a_stage() -> None:
    """The excess of 25 GB counted as movable, and a mesh without a plan was searched first."""
    staged = ClusterSetting(2, 4, 2, 1, 8, "zero1", "tp")
    found = PricedCandidate(staged, 10.0, 101e9, 0.0, movable_bytes=20e9)
    machine = dataclasses.replace(TOY, host=Host(10**12, 50e9, 1e-5, 10e9), memory_bytes=80 * 10**9)
    asked = Request(machine, ranks=16, headroom=0.05, offload=True)
    assert moved_seconds(found, asked) == math.inf
    assert moved_seconds(dataclasses.replace(found, movable_bytes=30e9), asked) == 0.5


@pytest.mark.parametrize("offload", [False, None])
def test_an_open_mesh_is_no_slower_than_a_given_one(offload: bool | None) -> None:
    """The recipe of an estimate exceeded the bound by 0.4 %, and two micro-batches won: 3.567 ms against 3.433."""
    graph = residual(1, Sizes(batch=4, width=64, hidden=128, vocab=64))
    request = Request(WITH_HOST, memory_bytes=200_000, batch=4, cuts_batch=True, offload=offload)
    opened = search_plan(graph, request.but(ranks=2, stages=(1,))).best
    named = search_plan(graph, request.but(mesh={"dp": 2})).best
    assert opened.price.step_seconds <= 1.001 * named.price.step_seconds


def test_recomputation_makes_room_for_parameters_that_the_host_would_store() -> None:
    """Moves are slow here: a plan that recomputes one block and stores two parameters beats one with neither or one."""
    slow = Host(10**9, bandwidth_bytes_per_second=2e8, latency_seconds=1e-6, update_bytes_per_second=1e7)
    graph = residual(8, Sizes(batch=64, width=64, hidden=256, vocab=64))
    request = Request(dataclasses.replace(TOY, host=slow), ranks=1, memory_bytes=4_885_010)
    both = search_plan(graph, request).best
    assert is_far(both) and both.plan.recompute not in ("none", "full")
    for asked in ({"offload": False}, {"recompute": "none"}):
        alone = search_plan(graph, request.but(**asked)).best
        assert both.price.step_seconds < 0.97 * alone.price.step_seconds


def test_a_search_with_the_host_is_not_left_out_for_another_number_of_micro_batches() -> None:
    """The bounds are those of the captured eight micro-batches; the host makes room for fewer, which are faster."""
    graph = residual(8, Sizes(batch=8, width=16, hidden=64, vocab=64))
    host = Host(10**9, 6e9, 1e-7, 2.4e10)
    asked = Request(dataclasses.replace(TOY, host=host), ranks=1, memory_bytes=454_518, mesh={"pp": 1}, schedule="1f1b")

    known = pipeline.search_pipeline(Case(graph, asked.but(offload=False), 8)).best.seconds
    assert pipeline.search_pipeline(Case(graph, asked.but(offload=True), 8), known).best.seconds < 0.995 * known


def test_parameters_stay_on_the_host_during_a_step_where_nothing_else_fits() -> None:
    """Less memory than resident parameters take: the plan moves some for each use, in every micro-batch and phase."""
    few, more = planned(least_near() // 5), planned(least_near() // 3)
    used, others = ({how.resident_tier for how in each.plan.parameters.values()} for each in (few, more))
    assert "host" in used and others == {"device"}
    assert few.price.peak_bytes <= least_near() // 5
    assert few.price.step_seconds > more.price.step_seconds
    (note,) = [note for note in few.plan.notes if kind_of(note) == "tiers"]
    assert "for each use" in note
    step = step_of(few.graph, few.plan, WITH_HOST)
    moves = [i for i in step.items if i.resource == "host" and i.phase in ("forward", "backward")]
    assert {(i.kind, i.phase) for i in moves} >= {
        ("to_device", "forward"),
        ("to_device", "backward"),
        ("from_device", "backward"),
    }


def test_the_plan_says_what_the_host_keeps() -> None:
    found = planned(int(least_near() * 0.6))
    (note,) = [note for note in found.plan.notes if kind_of(note) == "tiers"]
    kept = stored_bytes(found.graph, found.plan, WITH_HOST, "host")
    assert kept > 0 and "optimizer runs on the host" in note
    price = composed(found.graph, found.plan, WITH_HOST)
    assert price.peak_bytes <= 0.6 * least_near() and price == found.price


@pytest.mark.parametrize("refused", [{"offload": False}, {"without": frozenset({"offload"})}], ids=str)
def test_a_request_may_rule_the_host_out(refused: dict[str, object]) -> None:
    with pytest.raises(SearchError, match="fits"):
        planned(int(least_near() * 0.8), **refused)


def test_a_recipe_of_the_host_contradicts_a_request_that_rules_it_out() -> None:
    with pytest.raises(RecipeError, match="'dp:zero-offload' and --no offload exclude each other"):
        Request(WITH_HOST, mesh={"dp": 2}, recipe={"dp": "zero-offload"}, without=frozenset({"offload"}))


def test_a_host_that_is_too_small_is_refused_with_both_numbers() -> None:
    small = dataclasses.replace(WITH_HOST, host=dataclasses.replace(HOST, memory_bytes=1000))
    with pytest.raises(SearchError, match=r"keep .* of its host, and its share of that is 1.*kB") as found:
        search_plan(GRAPH, Request(small, mesh={"dp": 2}, recipe="zero-offload"))
    assert str(found.value).count("its share of that") == 1  # the search on the host fails alike


def test_a_machine_without_figures_of_its_host_is_told_what_to_give() -> None:
    with pytest.raises(Exception, match=r"no figures of the tier host: .* table \[host\]"):
        search_plan(GRAPH, Request(TOY, mesh={"dp": 2}, recipe="zero-offload"))


def test_files_are_counted_apart_from_the_host() -> None:
    """16 bytes of a parameter in files over two ranks; on the host the copy in use and the gradient, 8 of 16."""
    disk = Disk(10**9, 1e9, 1e9, 1e-6)
    machine = dataclasses.replace(WITH_HOST, nvme=disk)
    request = Request(machine, mesh={"dp": 2}, recipe="zero-infinity-nvme")
    found = search_plan(GRAPH, request).best
    files, host = (stored_bytes(found.graph, found.plan, machine, t) for t in ("nvme", "host"))
    assert host == files / 2
    assert sum("Files on disk store all parameters" in note for note in found.plan.notes) == 1
    small = dataclasses.replace(machine, nvme=dataclasses.replace(disk, memory_bytes=1000))
    with pytest.raises(SearchError, match=r"in files on its disks, and its share of that is 1.*kB"):
        search_plan(GRAPH, dataclasses.replace(request, hardware=small))


@pytest.mark.parametrize("recipe", ["zero-offload", "zero3-offload"])
def test_a_recipe_stores_every_parameter_on_the_host(recipe: str) -> None:
    found = search_plan(GRAPH, Request(WITH_HOST, mesh={"dp": 2}, recipe=recipe)).best
    assert {how.tier for how in found.plan.parameters.values()} == {"host"}
    near = search_plan(
        GRAPH,
        Request(WITH_HOST, mesh={"dp": 2}, recipe=recipe.removesuffix("-offload") + "2" * (recipe == "zero-offload")),
    ).best
    assert near.price.step_seconds < found.price.step_seconds
    assert near.price.peak_bytes > found.price.peak_bytes


def test_moves_and_memory_are_written_products() -> None:
    """Four matrices, by hand: a storage of n bytes moves n up and n down, and 16 bytes a parameter lie on the host."""
    found = search_plan(GRAPH, Request(WITH_HOST, mesh={"dp": 2}, recipe="zero-offload")).best
    sizes = {name: GRAPH.tensors[t] for name, t in GRAPH.parameters.items()}
    whole = sum(t.itemsize_bytes * _elements(t.shape) for t in sizes.values())
    assert stored_bytes(found.graph, found.plan, WITH_HOST, "host") == 4 * whole / 2


def _elements(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


def test_an_update_on_the_host_touches_nothing_on_the_device() -> None:
    """Of a parameter that the host stores the device holds copies, which no optimizer reads."""
    found = search_plan(GRAPH, Request(WITH_HOST, mesh={"dp": 2}, recipe="zero3-offload")).best
    step = step_of(found.graph, found.plan, WITH_HOST)
    kept = stored_bytes(found.graph, found.plan, WITH_HOST, "host")
    seconds = next(term.value for term in step.time() if term.name == "optimizer")
    # of 4 parts, parameter, gradient and two moments: 2, 3, 2 and 2 times
    assert seconds == pytest.approx(kept * (2 + 3 + 2 + 2) / 4 / HOST.update_bytes_per_second)


def test_plans_that_make_the_same_choices_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[Plan] = []

    class Noting(StagedPlan):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            priced.append(dataclasses.replace(self.plan, notes=(), recipe=""))

    monkeypatch.setattr(pipeline, "StagedPlan", Noting)
    request = Request(WITH_HOST, mesh={"pp": 2, "dp": 2}, micro_batches=4, offload=True)
    pipeline.search_pipeline(Case(GRAPH, request, 4))
    assert len(priced) > 1
    assert all(one != other for one, other in itertools.combinations(priced, 2))
