"""Questions to a plan's cost: what fits, what it depends on, and what would change it."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cost_model import H100
from autopar.cost_model.items import MIXED
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.steps.run import Run, total
from autopar.cost_model.steps.step import Step
from autopar.cost_model.symbols import symbol
from autopar.errors import AutoparError
from autopar.explanation.explanation import Explanation
from autopar.ir import Graph, Mesh, Plan, Stack
from autopar.planning.planning import prepare_step
from autopar.search import search
from tests.support.llama import Llama


@functools.cache
def graph() -> Graph:
    with torch.device("meta"):
        model = Llama(vocab=512, width=128, inner=256, heads=8, kv_heads=4, layers=2)
        tokens = torch.zeros(8, 64, dtype=torch.int64)
    found = prepare_step(model, (tokens, tokens)).analysis.graph
    return replace(found, stacks=(Stack("layers", 2, 2),))


@functools.cache
def plan(recipe: str) -> Plan:
    return search(graph(), {"dp": 4, "tp": 2}, hardware=H100, recipe=recipe)


def explanation(recipe: str, run: Run | None = None) -> Explanation:
    return Explanation(graph(), plan(recipe), Cluster(H100), run or Run(), tokens=8 * 64)


@pytest.fixture(scope="module")
def zero1() -> Explanation:
    return explanation("dp:zero1,tp:tp", Run(micro_batches=4, training_state=MIXED))


def parameters(e: Explanation) -> int:
    return sum(int(np.prod(e.graph.tensors[t].shape)) for t in e.graph.parameters.values())


def test_memory_by_hand() -> None:
    """Without sharding Adam in float32 keeps 16 bytes a parameter (ZeRO, section 3.1)."""
    e = explanation("dp:ddp,tp:ddp")
    kept = sum(e.memory.part(kind).value for kind in ("parameters", "gradients", "optimizer"))
    assert kept == 16 * parameters(e)


def test_traffic_by_hand() -> None:
    """Data parallelism over 8 ranks: an all-reduce of every gradient, 2 * 7 / 8 of 4 bytes each."""
    e = explanation("dp:ddp,tp:ddp")
    sent = {part.name: part.value for part in e.traffic.parts}
    gradients = 4 * parameters(e)
    assert sent["along dp"] == pytest.approx(2 * 3 / 4 * gradients, rel=1e-3)
    assert sent["along tp"] == pytest.approx(2 * 1 / 2 * gradients, rel=1e-3)


def test_the_largest_batch_fits_and_one_step_more_does_not(zero1: Explanation) -> None:
    bounded = zero1.what_if(hbm_bytes=1.5e9)
    found = bounded.solve_for("batch")
    assert found.value % 4 == 0  # dp splits the batch
    assert bounded.what_if(batch=found.value).fits
    assert not bounded.what_if(batch=found.value + 4).fits
    assert found.expression is not None
    values = {symbol(k): v for k, v in bounded.values.items()}
    values[symbol("memory_bound_bytes")] = 1.5e9
    assert float(found.expression.subs(values)) == pytest.approx(found.limit, rel=1e-6)


def test_the_formula_of_the_largest_batch_is_of_the_stage_that_is_full_there() -> None:
    """The last of two stages has the loss: with a large batch it needs more than the first."""
    staged = explanation("dp:zero1,tp:tp", Run(micro_batches=4, stages=2, training_state=MIXED))
    for bound_bytes in (1.02e9, 1.1e9, 1.5e9, 80e9):
        bounded = staged.what_if(hbm_bytes=bound_bytes)
        found = bounded.solve_for("batch")
        assert found.expression is not None
        values = {symbol(k): v for k, v in bounded.values.items()}
        values[symbol("memory_bound_bytes")] = bound_bytes
        assert float(found.expression.subs(values)) == pytest.approx(found.limit, rel=1e-6)


def test_what_cannot_be_solved_for_says_what_can(zero1: Explanation) -> None:
    with pytest.raises(AutoparError, match=r"does not depend on 'color'; it depends on batch"):
        zero1.solve_for("color")
    with pytest.raises(AutoparError, match="No batch fits"):
        zero1.what_if(hbm_bytes=1e6).solve_for("batch")


def test_sensitivities_are_the_derivatives(zero1: Explanation) -> None:
    """Against finite differences of the priced step."""
    found = zero1.sensitivity()
    for name in ("peak_flops_32bit", "bandwidth_dp", "seq", "memory_bytes_per_second"):
        up, down = (float(zero1.at(**{name: zero1.values[name] * (1 + h)}).seconds()) for h in (1e-5, -1e-5))
        slope = (up - down) / 2e-5 * 0.01 / zero1.step_seconds
        assert found.get(name, 0.0) == pytest.approx(slope, rel=1e-3, abs=1e-9), name


def test_what_if_takes_factors_units_and_sizes(zero1: Explanation) -> None:
    assert zero1.what_if(link_bandwidth=2).step_seconds < zero1.step_seconds
    assert zero1.what_if(hbm_bytes=141e9).bound_bytes == 141_000_000_000
    assert zero1.what_if(hbm_bytes=141e9).step_seconds == zero1.step_seconds
    assert zero1.what_if(batch=16).memory_bytes > zero1.memory_bytes
    with pytest.raises(AutoparError, match="There is no size or figure 'colour'"):
        zero1.what_if(colour=2)
    with pytest.raises(AutoparError, match="give a positive number"):
        zero1.what_if(batch=0)


def test_thousands_of_configurations_are_priced_at_once(zero1: Explanation) -> None:
    """The same as one by one; how fast is measured in benchmarks/speed/bench_pricing.py."""
    batches = np.arange(4.0, 40004.0, 4.0)
    seconds = zero1.at(batch=batches).seconds()
    assert seconds.shape == (10_000,)
    for i in (0, 17, 9_999):
        assert seconds[i] == pytest.approx(float(zero1.at(batch=batches[i]).seconds()))


SLOW_HOST = Cluster(replace(H100, host_seconds=4e-5))
HIDING = Cluster(replace(H100, hides=0.9))
TIMELINES = {  # name -> recipe, run, machine
    "zero1": ("dp:zero1,tp:tp", None, None),
    "zero3": ("dp:zero3,tp:tp", Run(micro_batches=3), None),
    "recomputed": ("dp:zero3,tp:tp", Run(micro_batches=2, recompute="full"), None),
    "hiding": ("dp:zero3,tp:tp", Run(micro_batches=2), HIDING),
    "hiding once a step": ("dp:zero1,tp:tp", None, HIDING),
    "slow host": ("dp:zero1,tp:tp", Run(micro_batches=4), SLOW_HOST),
    "stages": ("dp:zero1,tp:tp", Run(micro_batches=8, stages=2), None),
}


@functools.cache
def drawn(name: str) -> Explanation:
    recipe, run, machine = TIMELINES[name]
    e = explanation(recipe, run)
    if machine is None:
        return e
    # Buckets that each of the small weights fills, so that most messages hide.
    return replace(e, cluster=machine, plan=replace(e.plan, bucket_bytes=1024))


@pytest.mark.parametrize("name", sorted(TIMELINES))
def test_the_timeline_ends_with_the_step(name: str) -> None:
    e = drawn(name)
    ends = [event.start_seconds + event.duration_seconds for event in e.events()]
    assert max(ends) == pytest.approx(e.step_seconds, rel=1e-6)
    assert ends[-1] == max(ends)
    assert min(event.start_seconds for event in e.events()) == 0


@pytest.mark.parametrize("name", ["hiding", "recomputed", "zero1"])
def test_the_lanes_of_a_timeline_add_up_to_the_parts_of_the_step(name: str) -> None:
    """Of all communication, whether it hides or not; each part of the step is that of one lane, or is hidden."""
    e = drawn(name)
    regions = [e.step._region_terms(region, 1) for region in ("before", "layers", "after")]
    once = [t for t in e.step.time() if t.name in ("gathering parameters", "reducing gradients")]
    sent = e.step.run.micro_batches * sum(float(t.value) for terms in regions for t in terms if "along" in t.name)
    lanes = [event for event in e.events() if event.lane in ("dp", "tp")]
    found = sum(event.duration_seconds for event in lanes)
    assert found == pytest.approx(sent + sum(float(t.value) for t in once), rel=1e-6)


@pytest.mark.parametrize("name", ["hiding", "hiding once a step"])
def test_what_hides_lies_beside_compute(name: str) -> None:
    """All of a step's hidden seconds, and no more, are drawn beside other work."""
    e = drawn(name)
    hidden = -sum(float(t.value) for t in e.step.time() if "hidden" in t.name)
    hidden -= sum(
        float(part.value) * e.step.run.micro_batches
        for region in ("before", "after")
        for part in e.step._region_terms(region, 1)
        if "hidden" in part.name
    )
    whole = sum(event.duration_seconds for event in e.events())
    assert hidden > 0
    assert whole - e.step_seconds == pytest.approx(hidden, rel=1e-6)


def test_an_axis_may_be_called_what_a_size_is_called() -> None:
    e = explanation("dp:zero1,tp:tp")
    names = {"dp": "layers", "tp": "batch"}
    mesh = Mesh(tuple((names[axis], size) for axis, size in e.plan.mesh.axes))
    renamed = replace(e, plan=replace(e.plan, mesh=mesh))
    assert renamed.step_seconds == pytest.approx(e.step_seconds, rel=1e-12)
    assert renamed.memory_bytes == e.memory_bytes


def test_a_gathered_layer_is_in_the_peak() -> None:
    """With ZeRO-3 one layer's parameters and their gradients are whole for a moment."""
    e = explanation("dp:zero3,tp:tp").what_if(gate_0=2_560_000)
    gate = 4 * 128 * 2_560_000 / 2  # float32, hidden 128, split over tp
    assert e.memory.part("transient peak").value > 2 * 3 * gate


def test_figures_follow_what_is_asked(zero1: Explanation) -> None:
    twice = zero1.what_if(batch=16)
    assert twice.tokens_per_second is not None and zero1.tokens_per_second is not None
    ratio = twice.tokens_per_second * twice.step_seconds / zero1.step_seconds
    assert ratio == pytest.approx(2 * zero1.tokens_per_second)
    assert twice.mfu > zero1.mfu
    assert zero1.what_if(micro_batches=8).to_json()["run"]["micro_batches"] == 8


def test_nothing_is_solved_for_that_takes_no_memory(zero1: Explanation) -> None:
    with pytest.raises(AutoparError, match="needs no more memory"):
        zero1.solve_for("tp")
    with pytest.raises(AutoparError, match="give a positive number"):
        zero1.what_if(seq=float("nan"))


def test_json_has_units_and_is_finite(zero1: Explanation) -> None:
    document = zero1.to_json()
    assert document["step_seconds"] == zero1.step_seconds
    assert document["time"]["seconds"] == zero1.step_seconds
    assert document["memory"]["bytes"] == zero1.memory_bytes
    assert 0 < document["mfu"] < 1


def test_stages_hold_their_own_layers_and_micro_batches_in_flight() -> None:
    one = explanation("dp:ddp,tp:tp", Run(micro_batches=8)).step
    two = explanation("dp:ddp,tp:tp", Run(micro_batches=8, stages=2)).step

    def part(step: Step, name: str) -> float:
        return next(float(t.value) for t in step.memory("first") if t.name == name)

    assert part(two, "parameters") < part(one, "parameters")
    assert part(two, "saved activations") > part(one, "saved activations") / 2  # two in flight
    assert float(total(two.memory("last"))) > 0


def test_a_new_search_is_never_worse_than_the_old_plan() -> None:
    """Under `auto`, on a machine with links a hundred times faster, and with little memory."""
    e = explanation("auto")
    for changes in ({"link_bandwidth": 100.0}, {"flops": 0.01, "hbm_bytes": 1.2e9}):
        again = e.what_if(search=True, **changes)
        assert again.step_seconds <= e.what_if(**changes).step_seconds * (1 + 1e-9)
        assert again.plan.mesh == e.plan.mesh
    same = e.what_if(search=True, link_bandwidth=1)
    assert same.plan.ops == e.plan.ops
    assert same.step_seconds == e.step_seconds


def test_a_new_search_for_other_sizes_is_refused(zero1: Explanation) -> None:
    with pytest.raises(AutoparError, match="needs a new capture"):
        zero1.what_if(search=True, batch=16)


def test_a_notebook_shows_the_prediction(zero1: Explanation) -> None:
    shown = zero1._repr_mimebundle_((), ())["text/html"]
    assert "predicted on" in shown and "zero1" in shown
