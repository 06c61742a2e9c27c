"""Bounds of a pipeline against all cuts and against simulated schedules."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import simulate
from autopar.pipeline.stage_table import WholeModel
from autopar.search.stages.balance import balance_of
from autopar.search.stages.pipeline_bounds import least_seconds, may_fit, shortest_seconds
from autopar.search.stages.shape import Shape
from tests.search.stages.test_balance import SHAPES, table


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_is_faster_than_its_bound(schedule: str, chunks: int, seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    shape = Shape(ranks, chunks, schedule, 3 * ranks)
    forward, backward = ([draw.uniform(0.1, 9) for _ in range(12)] for _ in range(2))
    made = table(forward, backward=backward, send=draw.choice([0.0, 0.5]))
    cuts = tuple(sorted(draw.sample(range(1, 12), shape.stages - 1)))
    lists, waits = actions(shape.blank, shape.micro_batches), waits_for_sends(schedule)
    run = simulate(lists, made.stages(cuts), waits_for_sends=waits)
    slowest = run.step_seconds * (1 + 1e-9)
    assert 0 < least_seconds(made, shape, cuts) <= slowest
    assert 0 < shortest_seconds(made.whole, shape, made.whole) <= slowest


def test_the_bound_is_the_step_where_only_the_last_rank_waits() -> None:
    """GPipe of 1 and 1 second on two ranks: 4 micro-batches of 2 seconds, after 1 and before 1 of the first."""
    made, shape = table([1, 1], backward=[1, 1]), Shape(2, 1, "gpipe", 4)
    run = simulate(actions(shape.blank, 4), made.stages((1,)))
    assert least_seconds(made, shape, (1,)) == run.step_seconds == 10


def test_the_shortest_step_of_two_ranks() -> None:
    """12 s on two ranks, 2 micro-batches: twice 8 s on the first rank; or 8 s of it, and twice 4 s on the second."""
    whole = WholeModel(12.0, 1.0, 0.0, 0.0)
    assert shortest_seconds(whole, Shape(2, 1, "gpipe", 2), whole) == 16
    assert shortest_seconds(whole, Shape(2, 2, "interleaved", 2), whole) == 12
    assert shortest_seconds(whole, Shape(1, 1, "1f1b", 5), whole) == pytest.approx(60)
    slow = whole._replace(block_seconds=10.0)
    assert shortest_seconds(whole, Shape(2, 1, "gpipe", 2), slow) == 20


def test_there_is_most_room_if_ranks_with_much_in_flight_keep_most() -> None:
    """1F1B has 2 and 1 in flight: with 10 bytes a rank, the first keeps 6 and saves 2, the second saves 10."""
    shape = Shape(2, 1, "1f1b", 4)
    assert shape.least_in_flight == (2, 1)
    assert may_fit(WholeModel(1.0, 1.0, kept_bytes=6.0, saved_bytes=12.0), shape, 10.0)
    assert not may_fit(WholeModel(1.0, 1.0, kept_bytes=6.0, saved_bytes=12.1), shape, 10.0)
    assert not may_fit(WholeModel(1.0, 1.0, kept_bytes=20.1, saved_bytes=0.0), shape, 10.0)
    assert not may_fit(WholeModel(1.0, 1.0, kept_bytes=6.0, saved_bytes=0.0), shape, -1.0)


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_what_fits_is_not_ruled_out(schedule: str, chunks: int, seed: int) -> None:
    """Of all cuts, those that take least memory fit into what they take; far below that nothing may fit."""
    draw = random.Random(f"{schedule} {chunks} {seed}")
    shape = Shape(2, chunks, schedule, 4)
    figures = {each: [draw.randint(0, 9) for _ in range(8)] for each in ("kept", "saved", "late", "transient")}
    made = table([1.0] * 8, **figures)
    every = itertools.combinations(range(1, 8), shape.stages - 1)
    least_bytes = min(max(balance_of(made, shape, cuts).rank_bytes) for cuts in every)
    assert may_fit(made.whole, shape, least_bytes)
    assert not may_fit(made.whole, shape, 0.3 * least_bytes)
