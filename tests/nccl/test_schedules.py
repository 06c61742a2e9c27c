"""Every schedule's sends and receives are legal on NCCL, as the executor of stages runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.ir.pipeline import PLACEMENTS, SCHEDULES, Pipeline
from autopar.pipeline.schedules import actions, takes, waits_for_sends
from autopar.pipeline.simulation import StageCosts, simulate
from tests.support.nccl import stages
from tests.support.nccl.launches import MODES
from tests.support.nccl.rules import seconds, violations

_CHUNKS = {"one": (1,), "rounds": (2, 3), "v": (2,)}


def _pipeline(schedule: str, ranks: int, chunks: int) -> Pipeline:
    return Pipeline(ranks, schedule, tuple(f"cut{i}" for i in range(ranks * chunks - 1)))


def _pipelines(schedule: str, ranks: tuple[int, ...]) -> Iterator[tuple[Pipeline, int]]:
    """Pipelines with a schedule, and numbers of micro-batches around that of their ranks."""
    for size in ranks:
        for chunks in _CHUNKS[PLACEMENTS[schedule]]:
            pipeline = _pipeline(schedule, size, chunks)
            for count in sorted({1, size, 2 * size, 2 * size + 1}):
                if takes(pipeline, count) and pipeline.stages * count <= 200:
                    yield pipeline, count


@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_a_schedule_is_legal(schedule: str) -> None:
    for pipeline, count in _pipelines(schedule, (2, 3, 4, 8)):
        traces = stages.played(pipeline, count)
        for mode in MODES:
            assert not violations(traces, mode), (pipeline.ranks, pipeline.chunks, count, mode)


@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_an_evaluation_is_legal(schedule: str) -> None:
    for pipeline, count in _pipelines(schedule, (4,)):
        traces = stages.played(pipeline, count, trains=False)
        for mode in MODES:
            assert not violations(traces, mode), (pipeline.chunks, count, mode)


def test_two_sends_at_once_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of 1F1B are what saves it: of two neighbours each sends while the other one does."""
    pipeline = Pipeline(2, "1f1b", ("cut",))
    monkeypatch.setattr(stages, "waits_for_sends", lambda schedule: False)
    for mode in MODES:
        assert "deadlock" in violations(stages.played(pipeline, 4), mode)[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulated_step_is_that_of_communicators_of_two_ranks(schedule: str) -> None:
    """A forward takes 1 s, a backward 2 s, a message 0.02 s; the first meeting takes three messages."""
    pipeline = _pipeline(schedule, 4, _CHUNKS[PLACEMENTS[schedule]][0])
    cost = StageCosts(1.0, 2.0, weight_seconds=1.0, send_forward_seconds=0.02, send_backward_seconds=0.02)
    simulated = simulate(actions(pipeline, 8), [cost] * pipeline.stages, waits_for_sends=waits_for_sends(schedule))
    run = seconds(stages.played(pipeline, 8), "lazy", lambda call: 0.02)
    assert run == pytest.approx(simulated.step_seconds, rel=0.02)
