"""Saved tensors on the host: the same training, and what leaves the device and comes back, as priced."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from gpt import loss_fn

import autopar
from autopar.ir import Graph, Plan
from autopar.ir.saved import SavedLayout
from autopar.pipeline.composed import step_of, stored_bytes
from autopar.pipeline.saved_values import SavedValues
from autopar.runtime.ranks.tiers import Tiers
from tests.runtime.execute.test_recompute import NO_PIPELINE, joined, planned
from tests.runtime.execute.test_saved import LAYERS, MICRO_BATCHES, STREAM, alone, gpt, ten_steps
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import Batch
from tests.runtime.ranks.test_tiers import CPU_GLOO
from tests.runtime.training import difference
from tests.support.staged import captured_once

BOTH_WAYS = ("from_device", "to_device")
# The input of the first block is a partial sum under tp, so that no rank can take a slice of it.
CASES = {"whole": ("R host", LAYERS * STREAM), "in slices": ("S(1)@tp host", STREAM + (LAYERS - 1) * STREAM // 2)}


class Moved(NamedTuple):
    """Bytes of one step of a rank.

    Attributes:
        most: the most bytes that the host had at once.
        priced: bytes that the price says the host has.
        moved: bytes by move.
        to_move: bytes by move, by the price.
        left: bytes that the host still has after the step.
    """

    most: int
    priced: float
    moved: Counter[str]
    to_move: Counter[str]
    left: int


def moved(model: Any, batch: Batch, plan: Plan, graph: Graph, patch: pytest.MonkeyPatch) -> Moved:
    compiled = autopar.compile(copy.deepcopy(model), loss_fn=loss_fn, plan=plan)
    compiled.step(*batch)
    compiled.zero_grad()
    tiers: Tiers = compiled._kept.ready[True][0].bound._runner.world.tiers  # type: ignore[union-attr]
    before, most, keep = dict(tiers.moved_bytes), [0], tiers.keep

    def watched(*args: Any) -> Any:
        kept = keep(*args)
        most.append(tiers.live_bytes["host"])
        return kept

    patch.setattr(tiers, "keep", watched)
    compiled.step(*batch)
    gc.collect()
    step = step_of(graph, plan, CPU_GLOO)
    to_move: Counter[str] = Counter()
    for item in step.items:
        if item.resource == "host":
            to_move[item.kind] += int(MICRO_BATCHES * item.count * item.traffic_bytes)
    found = {name: tiers.moved_bytes["host", name] - before["host", name] for name in BOTH_WAYS}
    priced = stored_bytes(graph, plan, CPU_GLOO, "host")
    return Moved(max(most), priced, Counter(found), to_move, tiers.live_bytes["host"])


def on_host(text: str, pipeline: tuple[str, int], micro_batches: int = MICRO_BATCHES) -> tuple[Plan, Graph]:
    """The plan of `tp` that recomputes blocks, and keeps their inputs as a line says."""
    plan, graph = planned((*gpt(), loss_fn), {"tp": 2}, "tp", micro_batches, pipeline)
    line = SavedLayout.parse(text, "it", plan.mesh)
    return replace(plan, recompute="full", saved={"blocks.*.input": line}), graph


@captured_once()
def on_two_ranks(text: str) -> tuple[Moved, dict[str, Any]]:
    model, batch = gpt()
    plan, graph = on_host(text, NO_PIPELINE)
    with pytest.MonkeyPatch.context() as patch:
        figures = moved(model, batch, plan, graph, patch)
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)
    return figures, ten_steps(compiled, compiled.step, batch)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_and_moves_what_is_priced(two_ranks: Ranks, name: str) -> None:
    text, size = CASES[name]
    expected = alone()
    for figures, trained in two_ranks.run(on_two_ranks, text):
        assert difference(trained, expected) < 1e-9
        assert figures.moved == figures.to_move == dict.fromkeys(BOTH_WAYS, MICRO_BATCHES * size)
        assert figures.most == figures.priced == size and figures.left == 0


@captured_once()
def through_stages(schedule: str) -> dict[str, Any]:
    model, batch = gpt()
    plan, _ = on_host("S(1)@tp host", (schedule, 2))
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)
    return ten_steps(compiled, compiled.step, batch)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_stages_keep_on_the_host(four_ranks: Ranks, schedule: str) -> None:
    expected, parts = alone(), four_ranks.run(through_stages, schedule)
    assert difference(joined(parts, list(expected)), expected) < 1e-9


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 4), ("1f1b", 1)])
def test_the_host_has_every_micro_batch_in_flight(schedule: str, in_flight: int) -> None:
    """Of four micro-batches, on the last of two stages, which has all blocks."""
    plan, graph = on_host("R host", (schedule, 2), micro_batches=4)
    one = STREAM * MICRO_BATCHES / 4
    kept = len(SavedValues(graph, plan).slices)
    assert stored_bytes(graph, plan, CPU_GLOO, "host") == in_flight * kept * one
