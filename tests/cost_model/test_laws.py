"""Laws of the whole cost model, over random plans of a small model: what no constant may break."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
import sympy
import torch

from autopar.cost_model import H100
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.machines.cluster import Cluster
from autopar.cost_model.machines.hardware import Hardware, Link
from autopar.cost_model.machines.software import AUTOPAR
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.steps.run import Run, total
from autopar.cost_model.steps.step import Step
from autopar.cost_model.symbols import symbol
from autopar.cost_model.traffic import traffic_bytes
from autopar.explanation.explanation import Explanation
from autopar.ir import Graph, Mesh, Plan, Stack
from autopar.ir.recompute import Recompute
from autopar.planning.planning import prepare_step
from autopar.proof.random_plan import random_plan
from autopar.search import search
from tests.search import stacked
from tests.support.llama import Llama
from tests.support.tables import often

MESH = Mesh.of({"dp": 2, "tp": 2})
SEEDS = often(range(8), range(3))
LAYERS = 8


@lru_cache
def graph(batch: int = 4) -> Graph:
    with torch.device("meta"):
        model = Llama(vocab=64, width=32, inner=64, heads=4, kv_heads=2, layers=3)
        tokens = torch.zeros(batch, 16, dtype=torch.int64)
    found = prepare_step(model, (tokens, tokens)).analysis.graph
    return dataclasses.replace(found, stacks=(Stack("layers", LAYERS, 3),))


@lru_cache
def usual_plan() -> Plan:
    return search(graph(), MESH, hardware=H100, recipe="dp:zero1,tp:tp+sp")


@lru_cache
def plan(seed: int) -> Plan:
    return random_plan(graph(), MESH, seed=seed, fingerprint="")


def step_of(
    seed: int, hardware: Hardware = H100, run: Run | None = None, model: Graph | None = None, chosen: Plan | None = None
) -> Step:
    """A random plan priced with plain numbers."""
    model, chosen, run = model or graph(), chosen or plan(seed), run or Run(micro_batches=2)
    links = [hardware.link(MESH, axis) for axis in range(len(MESH.axes))]
    pricer = Pricer(model, chosen, sizes=Sizes(MESH), hardware=hardware, links=links)
    return Step(
        list(pricer.items()),
        list(pricer.holdings()),
        run,
        hardware,
        AUTOPAR,
        layers=LAYERS,
        boundary_bytes=pricer.boundary_bytes(),
        boundary_link=hardware.across_nodes,
    )


def peak(step: Step) -> float:
    return max(total(step.memory("first")), total(step.memory("last")))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_cost_is_positive(seed: int) -> None:
    step = step_of(seed)
    assert all(i.seconds >= 0 and i.count >= 0 and i.traffic_bytes >= 0 for i in step.items)
    assert all(h.bytes > 0 for h in step.holdings)
    assert step.seconds() > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_time_and_memory_rise_with_the_batch(seed: int) -> None:
    """The same plan for twice the sequences."""
    small, large = step_of(seed), step_of(seed, model=graph(batch=8))
    assert large.seconds() > small.seconds()
    assert peak(large) > peak(small)
    assert total(large.traffic()) >= total(small.traffic())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faster_machine_is_never_slower(seed: int) -> None:
    plain = step_of(seed).seconds()
    for name in ("memory_bytes_per_second", "memory_efficiency", "matmul_efficiency"):
        faster = dataclasses.replace(H100, **{name: 2 * getattr(H100, name)})
        assert step_of(seed, faster).seconds() <= plain
    slower = dataclasses.replace(H100, host_seconds=H100.host_seconds + 1e-5)
    assert step_of(seed, slower).seconds() > plain


def test_gradients_that_fill_no_bucket_take_one_collective_at_least() -> None:
    """They paid for their part of a bucket of 25 MiB: all together for a thousandth of the latency.

    Two of 6 MiB each, of 12 in all, fill a bucket of the runtime each.
    """
    slow = dataclasses.replace(H100, inside_node=Link(1e15, 1.0))
    for model, buckets in ((stacked.residual(2), 1), (stacked.residual(2, stacked.Sizes(vocab=98304)), 2)):
        plan = search(model, {"x": 2}, hardware=H100, recipe="ddp")
        links = [slow.link(plan.mesh, 0)]
        pricer = Pricer(model, plan, sizes=Sizes(plan.mesh), hardware=slow, links=links)
        sent = [i for i in pricer.items() if i.phase == "reduce" and i.ranks > 1]
        # An all-reduce over two ranks is two steps of the ring.
        assert sum(i.count * i.seconds for i in sent) == pytest.approx(2 * buckets, rel=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_crossing_nodes_never_costs_less(seed: int) -> None:
    inside, across, apart = (
        step_of(seed, dataclasses.replace(H100, devices_per_node=size)).seconds() for size in (8, 2, 1)
    )
    assert inside <= across <= apart


@pytest.mark.parametrize("seed", SEEDS)
def test_names_and_order_of_nodes_do_not_matter(seed: int) -> None:
    """The same model with every op and tensor renamed and its tables in reverse."""
    new = {name: f"n{i}" for i, name in enumerate(graph().tensors)}
    ops = {op.name: f"op{i}" for i, op in enumerate(graph().ops)}
    shuffled = dataclasses.replace(
        graph(),
        tensors={new[name]: dataclasses.replace(t, name=new[name]) for name, t in reversed(graph().tensors.items())},
        ops=tuple(
            dataclasses.replace(
                op,
                name=ops[op.name],
                operands=tuple(new[n] for n in op.operands),
                results=tuple(new[n] for n in op.results),
                saved=tuple(new[n] for n in op.saved),
                hidden=tuple(new[n] for n in op.hidden),
            )
            for op in graph().ops
        ),
        parameters={k: new[v] for k, v in reversed(graph().parameters.items())},
        buffers={k: new[v] for k, v in graph().buffers.items()},
        inputs={k: new[v] for k, v in graph().inputs.items()},
        outputs=tuple(new[n] for n in graph().outputs),
    )
    moved = dataclasses.replace(plan(seed), ops={ops[name]: labels for name, labels in plan(seed).ops.items()})
    plain, renamed = step_of(seed), step_of(seed, model=shuffled, chosen=moved)
    assert renamed.seconds() == pytest.approx(plain.seconds(), rel=1e-12)
    assert peak(renamed) == pytest.approx(peak(plain), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("size_bytes", [1, 10**4, 10**7, 10**10])
def test_an_all_reduce_lies_between_its_halves_and_their_sum(ranks: int, size_bytes: int) -> None:
    for link in (H100.inside_node, H100.across_nodes, Link(1e9, 1e-5)):

        def seconds(name: str, before: float, after: float, link: Link = link) -> float:
            return collective_seconds(
                name, before_bytes=before, after_bytes=after, ranks=ranks, link=link, hardware=H100
            )

        scatter = seconds("reduce_scatter", size_bytes, size_bytes / ranks)
        gather = seconds("all_gather", size_bytes / ranks, size_bytes)
        both = seconds("all_reduce", size_bytes, size_bytes)
        assert scatter <= both * (1 + 1e-12)
        assert both <= (scatter + gather) * (1 + 1e-12)


@pytest.mark.parametrize("fill", [0.0, 1e-5, 1e-2])  # none, less and more than a bucket takes
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"])
def test_a_part_of_a_bucket_is_never_dearer_than_a_message_of_its_own(name: str, fill: float) -> None:
    link = dataclasses.replace(H100.inside_node, fill_seconds=fill)

    def seconds(size_bytes: float, is_bucketed: bool) -> float:
        part, whole = size_bytes / 8, size_bytes
        before = part if name == "all_gather" else whole
        after = part if name == "reduce_scatter" else whole
        return collective_seconds(
            name,
            before_bytes=before,
            after_bytes=after,
            ranks=8,
            link=link,
            hardware=H100,
            bucketed=is_bucketed,
            bucket_bytes=2**20,
        )

    sizes = [2.0**power for power in range(8, 24)]
    in_buckets = [seconds(size, True) for size in sizes]
    alone = [seconds(size, False) for size in sizes]
    assert in_buckets == sorted(in_buckets) and alone == sorted(alone)
    assert all(part <= own * (1 + 1e-12) for part, own in zip(in_buckets, alone, strict=True))
    # Parts that make up a bucket take as long as the bucket.
    assert 16 * seconds(2.0**16, True) == pytest.approx(seconds(2.0**20, False))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_of_equal_stages_has_the_bubble_of_gpipe(seed: int) -> None:
    """(p - 1) / v of a stage's micro-batch time, where embedding and head cost nothing."""
    for stages, chunks in ((2, 1), (4, 1), (4, 2)):
        run = Run(micro_batches=8, stages=stages, chunks=chunks)
        step = step_of(seed, run=run)
        step.items = [item for item in step.items if item.region == "layers"]
        bubble = next(t.value for t in step.time() if t.name == "pipeline bubble")
        slowest, everything = step._stages()
        assert slowest * stages == pytest.approx(everything)
        assert bubble == pytest.approx((stages - 1) * slowest / chunks)


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputing_takes_longer_and_keeps_less(seed: int) -> None:
    plain = step_of(seed)
    again = step_of(seed, run=Run(micro_batches=2, recompute="full"))
    assert again.seconds() > plain.seconds()
    assert peak(again) < peak(plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_layer_that_runs_again_takes_as_long_and_keeps_as_much_less(seed: int) -> None:
    layers = int(step_of(seed).layers)
    hows: list[Recompute] = ["none", *range(1, layers), "full"]
    steps = [step_of(seed, run=Run(micro_batches=2, recompute=how)) for how in hows]
    seconds = [float(step.seconds()) for step in steps]
    peaks = [float(peak(step)) for step in steps]
    assert np.diff(seconds) == pytest.approx([(seconds[-1] - seconds[0]) / layers] * layers)
    falls = -np.diff(peaks[:-1])  # the last layer then runs again beside what entered all
    assert falls == pytest.approx([falls[0]] * len(falls)) and (falls > 0).all()
    assert step_of(seed, run=Run(micro_batches=2, recompute=layers)).seconds() == seconds[-1]


def test_expressions_and_values_are_one() -> None:
    """Every expression of the trees, with the numbers put in, is the value beside it."""
    e = Explanation(graph(), usual_plan(), Cluster(H100), Run(micro_batches=2))
    nodes = [node for tree in (e.time, e.memory, e.traffic) for _, node in tree.walk()]
    symbols = [symbol(name) for name in e.values]
    evaluate = sympy.lambdify(symbols, [node.expression for node in nodes], "math", cse=True)
    for node, value in zip(nodes, evaluate(*e.values.values()), strict=True):
        assert value == pytest.approx(node.value, rel=1e-9, abs=1e-18), node.name
        if node.parts and not node.note:
            assert sum(p.value for p in node.parts) == pytest.approx(node.value, rel=1e-9)


def test_symbols_and_numbers_price_alike() -> None:
    """The expressions at a plan's own sizes are what the formulas give for plain numbers."""
    e = Explanation(graph(), usual_plan(), Cluster(H100), Run(micro_batches=2))
    numbers = step_of(0, chosen=usual_plan())
    assert e.step_seconds == pytest.approx(numbers.seconds(), rel=1e-12)
    assert e.memory_bytes == pytest.approx(peak(numbers), rel=1e-12)


@pytest.mark.parametrize("name", ["all_gather_v2", "", "multicast"])
def test_what_nobody_priced_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match="no formula"):
        traffic_bytes(name, before_bytes=1, after_bytes=1, ranks=2)
