"""How a step adds up over pipeline stages, by hand and against what torch's schedules do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.cost_model import H100
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.cuts import Cuts
from autopar.cost_model.items import COMPUTE, MemoryItem, WorkItem
from autopar.cost_model.machines.software import AUTOPAR
from autopar.cost_model.steps.run import STAGES, Run, Stage, total
from autopar.cost_model.steps.step import Step
from autopar.ir.pipeline import Pipeline
from autopar.pipeline.schedules import actions

LINK = H100.across_nodes


def step(run: Run, *holdings: MemoryItem, parts: int = 1) -> Step:
    """Eight layers that keep what `holdings` say, with 1e6 bytes from one to the next."""
    return Step(
        (), holdings, run, H100, AUTOPAR, layers=8, boundary_bytes=1e6, boundary_link=LINK, boundary_parts=parts
    )


def sends(found: Step) -> float:
    """Seconds of stage boundaries in those of one message of 1e6 bytes."""
    one = collective_seconds("send", before_bytes=1e6, after_bytes=1e6, ranks=2, link=LINK, hardware=H100)
    return next(t.value for t in found.time() if t.name == "stage boundaries") / one


def in_flight(ranks: int, chunks: int, micro_batches: int) -> list[float]:
    """The most micro-batches at once on every rank of torch's own schedule, counted in all chunks."""
    stages = ranks * chunks
    pipeline = Pipeline(ranks, "interleaved" if chunks > 1 else "1f1b", tuple(f"op{i}" for i in range(1, stages)))
    found = []
    for each in actions(pipeline, micro_batches):
        steps = [{"F": 1, "B": -1}.get(action.kind, 0) for action in each]
        found.append(max(itertools.accumulate(steps)) / chunks)
    return found


@pytest.mark.parametrize(
    ("run", "messages"),
    [
        (Run(micro_batches=8, stages=1), 0),
        (Run(micro_batches=8, stages=4), 2 * (8 + 3)),
        (Run(micro_batches=8, stages=4, chunks=2), 2 * (16 + 3)),
    ],
)
def test_every_chunk_sends_both_ways(run: Run, messages: int) -> None:
    assert sends(step(run)) == pytest.approx(messages)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 2)])
def test_micro_batches_in_flight_are_those_of_the_schedule(ranks: int, chunks: int) -> None:
    micro_batches = 4 * ranks
    found = step(Run(micro_batches=micro_batches, stages=ranks, chunks=chunks))
    ran = in_flight(ranks, chunks, micro_batches)
    assert [found._in_flight(stage) for stage in STAGES] == pytest.approx([ran[0], ran[1], ran[-1]])


def test_few_micro_batches_are_all_in_flight() -> None:
    assert step(Run(micro_batches=2, stages=8))._in_flight("first") == 2


def test_the_fullest_stage_may_be_the_second() -> None:
    """Ends of one layer: 4 in flight of one, 3 in flight of three, and one of one."""
    run = Run(micro_batches=8, stages=4, cuts=Cuts(1, 3, 1))
    found = step(run, MemoryItem("attention", "saved activations", "layers", 8e9))
    expected: dict[Stage, float] = {"first": 4e9, "middle": 9e9, "last": 1e9}
    for stage, saved in expected.items():
        assert total(found.memory(stage)) == saved + H100.reserved_bytes
    assert found.peak_bytes() == 9e9 + H100.reserved_bytes


def test_ends_are_held_by_the_stages_that_have_them() -> None:
    held = [MemoryItem(region, "parameters", region, 1e9) for region in ("before", "layers", "after")]
    found = step(Run(stages=4), *held)
    assert [found.held("parameters", stage) for stage in STAGES] == [1.25e9, 0.25e9, 1.25e9]
    assert step(Run(), *held).held("parameters", "first") == 3e9


def test_a_message_in_parts_is_kept_whole() -> None:
    run = Run(micro_batches=8, stages=4, recompute="full")
    whole, parts = step(run), step(run, parts=8)
    assert sends(parts) < sends(whole)
    assert total(parts.memory()) == total(whole.memory())
    assert total(whole.memory()) == 2 * 4 * 1e6 + H100.reserved_bytes  # two layers, four in flight


@pytest.mark.parametrize(("resource", "seconds"), [("dp", 2.5), ("host", 3.0), ("nvme", 3.0)])
def test_messages_hide_behind_compute_and_moves_between_memories_do_not(resource: str, seconds: float) -> None:
    product = WorkItem("product", "linear", COMPUTE, "forward", "layers", 1, 2.0, 0)
    gather = WorkItem("weight", "gather", resource, "forward", "layers", 1, 1.0, 0, carries="parameter")
    machine = replace(H100, hides=0.5)
    made = Step((product, gather), (), Run(), machine, AUTOPAR, layers=8, boundary_bytes=0)
    assert made.seconds() == pytest.approx(seconds)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_takes_what_its_host_needs_to_launch_it(runs_ahead: bool) -> None:
    """Each op takes as long to launch as to run, and half of the gather would hide: the host needs 3 s."""
    product = WorkItem("product", "linear", COMPUTE, "forward", "layers", 1, 2.0, 0, kernels=2)
    gather = WorkItem("weight", "gather", "dp", "forward", "layers", 1, 1.0, 0, carries="parameter", ranks=2)
    machine = replace(H100, hides=0.5, host_seconds=1.0)
    software = replace(AUTOPAR, runs_ahead=runs_ahead)
    made = Step((product, gather), (), Run(), machine, software, layers=8, boundary_bytes=0)
    assert made.seconds() == pytest.approx(3.0)
    assert made.is_late("layers")


@pytest.mark.parametrize(("resource", "seconds"), [("dp", 2.5), ("host", 3.0)])
def test_reductions_hide_behind_backward_and_moves_do_not(resource: str, seconds: float) -> None:
    product = WorkItem("product", "linear", COMPUTE, "backward", "layers", 1, 2.0, 0)
    reduction = WorkItem(
        "weight", "reduce", resource, "reduce", "layers", 1, 1.0, 0, carries="gradient", every_micro_batch=False
    )
    machine = replace(H100, hides=0.5)
    made = Step((product, reduction), (), Run(), machine, AUTOPAR, layers=8, boundary_bytes=0)
    assert made.seconds() == pytest.approx(seconds)
