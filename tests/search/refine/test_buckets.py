"""The size of buckets is a choice of the plan: priced, searched, written down, and taken as it was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import Link, find_hardware
from autopar.cost_model.buckets import buckets_hide, sent_bytes
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.software import AUTOPAR
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh, Plan
from autopar.ir.note import kind_of
from autopar.pipeline.composed import composed
from autopar.search.candidates.outer import search_plan
from autopar.search.refine.buckets import sizes_of, usual_bytes, usual_seconds, with_buckets
from autopar.search.request.request import Request
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_settings import PipelineFound
from tests.search.stacked import residual

WIDTH, LAYERS = 1024, 8


def explained(latency_seconds: float, bucket_bytes: int | str | None = None, **options: object) -> Explanation:
    """Plain data parallelism of 33.6 MB of weights on four ranks whose messages begin after a latency."""
    cpu = find_hardware("cpu-gloo")
    link = Link(bandwidth_bytes_per_second=1e9, latency_seconds=latency_seconds)
    hardware = replace(cpu, inside_node=link, across_nodes=link, hides=1.0)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        x = torch.zeros(1024, WIDTH)
    asked = {"mesh": {"dp": 4}, "recipe": "ddp", "bucket_bytes": bucket_bytes, **options}
    return autopar.explain(model, (x,), loss_fn=lambda y: y.pow(2).mean(), cluster=Cluster(hardware), **asked)


def test_the_bytes_that_a_backward_reduces() -> None:
    found = explained(0.0)
    assert sent_bytes(found.graph, found.plan) == LAYERS * WIDTH * WIDTH * 4


@pytest.mark.parametrize(("latency_seconds", "buckets"), [(1e-7, 8), (1.0, 1)])
def test_a_long_latency_asks_for_few_buckets_and_a_short_one_for_many(latency_seconds: float, buckets: int) -> None:
    """Messages of 0.05 s beside a backward of longer: without latency all but the last bucket hide."""
    found = explained(latency_seconds)
    total = LAYERS * WIDTH * WIDTH * 4
    assert found.plan.bucket_bytes == total // buckets
    assert found.to_json()["run"]["bucket_bytes"] == total // buckets
    (note,) = (each for each in found.plan.notes if kind_of(each) == "buckets")
    assert f"bucket_bytes={usual_bytes(found.graph, found.plan)} forces that" in note


def test_the_choice_is_the_best_of_its_sizes_and_explain_prices_it() -> None:
    found = explained(2e-3)
    chosen = found.plan.bucket_bytes
    figures = {"hardware": found.cluster.hardware, "software": AUTOPAR}
    priced = {
        size: composed(found.graph, replace(found.plan, bucket_bytes=size), **figures).step_seconds
        for size in sizes_of(found.graph, found.plan)
    }
    assert chosen == min(priced, key=priced.__getitem__)
    assert found.step_seconds == pytest.approx(priced[chosen])


def test_a_size_that_is_asked_for_is_in_the_plan_and_in_its_price() -> None:
    few, many = explained(1e-2, 2**30), explained(1e-2, "1MB")
    assert (few.plan.bucket_bytes, many.plan.bucket_bytes) == (2**30, 1_000_000)
    # 8 weights of 4 MB, each a message of its own: 7 all-reduces more, of 6 messages each
    assert many.step_seconds > few.step_seconds + 7 * 6 * 1e-2 * 0.7


def test_a_plan_without_a_gain_names_no_buckets() -> None:
    """Nothing hides here, and messages have no latency: all sizes cost the same."""
    found = explained(0.0, mesh={"dp": 1})
    assert found.plan.bucket_bytes is None


def test_a_single_bucket_hides_nothing_and_many_hide_most() -> None:
    """Of 8 weights, each of which fills the smallest bucket."""
    found = explained(1e-3)
    total = int(sent_bytes(found.graph, found.plan))

    def hides(size: int | None) -> float:
        plan = replace(found.plan, bucket_bytes=size)
        return buckets_hide(found.graph, plan, Flow(found.graph, plan))

    sizes = (total, total // 2, total // 4, total // 8, 1, None)
    assert [hides(size) for size in sizes] == [0, 0.5, 0.75, 0.875, 0.875, 0.75]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "ddp", "tp": "tp"}},
        {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp"}},
        {"mesh": {"pp": 2, "dp": 2}, "recipe": "ddp", "schedule": "1f1b"},
    ],
    ids=["dp,tp", "zero3,tp", "pp,dp"],
)
def test_the_usual_size_costs_the_same_where_it_is_named(options: dict[str, Any]) -> None:
    """Also where tensor parallelism or stages leave a rank fewer bytes to send than the model has."""
    found = explained(2e-3, **options)
    figures = {"hardware": found.cluster.hardware, "software": AUTOPAR}
    sizes = (None, usual_bytes(found.graph, found.plan))
    unnamed, named = (composed(found.graph, replace(found.plan, bucket_bytes=size), **figures) for size in sizes)
    assert unnamed.step_seconds == pytest.approx(named.step_seconds)


@pytest.mark.parametrize("times", [1.01, 2, 3])
def test_a_question_about_other_buckets_has_the_price_of_a_plan_with_them(times: float) -> None:
    """Larger ones pay fewer latencies and hide less; of the formula, both."""
    found = explained(2e-3)
    size = round(times * found.values["bucket_bytes"])
    named = composed(found.graph, replace(found.plan, bucket_bytes=size), found.cluster.hardware).step_seconds
    assert found.what_if(bucket_bytes=size).step_seconds == pytest.approx(named)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_search_of_stages_counts_the_buckets_of_a_stage(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prices plans before they are cut, and explain prices the cut plan: both by the parameters of one stage."""
    prices: list[float] = []

    def searched(*args: Any) -> PipelineFound:
        prices.append((found := search_pipeline(*args)).best.seconds)
        return found

    monkeypatch.setattr("autopar.search.stages.given.search_pipeline", searched)
    mesh = {"pp": stages, "dp": 2}
    found = explained(2e-3, 2**20, mesh=mesh, recipe="ddp", schedule="1f1b", micro_batches=4)
    usual = composed(found.graph, replace(found.plan, bucket_bytes=None), found.cluster.hardware).step_seconds
    assert min(prices) == pytest.approx(usual)


def test_buckets_do_not_bound_what_turns_hide_of_activations() -> None:
    """One bucket hides nothing of gradients, and two micro-batches that take turns as much of activations as before."""
    options = {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "ddp", "tp": "tp"}, "micro_batches": 2}
    for size in (2**20, 2**30):
        alone, turns = (explained(1e-6, size, overlap_batches=n, **options) for n in (1, 2))
        step = turns.step
        sent = sum(2 * float(i.count * i.seconds) for i in step.items if i.carries == "activation")
        assert sent > 0 and alone.step_seconds - turns.step_seconds == pytest.approx(step.hardware.hides * sent)


def test_a_plan_with_stages_is_compared_by_its_whole_price() -> None:
    """The time to launch kernels, which a search of stages adds, belongs to the price in the usual buckets."""
    request = Request(find_hardware("h100"), mesh=Mesh.of({"pp": 2, "dp": 2}), memory_bytes=10**12)
    found = search_plan(residual(4), request).best
    assert found.plan.pipeline is not None and found.plan.bucket_bytes is None
    named = with_buckets(found, request.but(bucket_bytes=2**20))
    assert usual_seconds(named, request) == pytest.approx(found.price.step_seconds)


def test_a_bound_on_memory_rules_out_large_buckets() -> None:
    """One bucket of 256 MB takes two buffers of 230 MB more than the usual reserve."""
    free = explained(1.0, None)
    assert free.plan.bucket_bytes is not None
    bound = int(free.memory_bytes) - 1_000_000
    held = explained(1.0, None, memory_bytes=bound)
    assert held.memory_bytes <= bound and held.plan.bucket_bytes != free.plan.bucket_bytes


def test_a_plan_that_need_not_fit_is_not_taken_out_of_memory_by_its_buckets() -> None:
    free = explained(1.0)
    assert free.request is not None
    bound = int(free.memory_bytes) - 1_000_000
    found = search_plan(free.graph, free.request.but(memory_bytes=bound, must_fit=False)).best
    assert found.price.peak_bytes <= bound


def test_the_text_and_the_json_of_a_plan_have_its_buckets() -> None:
    plan = replace(explained(0.0).plan, bucket_bytes=12_345)
    assert "\nbuckets 12345\n" in str(plan)
    assert Plan.parse(str(plan)).bucket_bytes == Plan.from_json(plan.to_json()).bucket_bytes == 12_345
    with pytest.raises(autopar.PlanError, match=r"whole number of bytes such as 26214400, not 0"):
        replace(plan, bucket_bytes=0)
