"""The arithmetic of benchmarks/soak, on lives written by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.soak.report import Soak, gap
from benchmarks.soak.run import Kill, kills_of
from benchmarks.soak.samples import Life, Sample, between, drifts, lives_in


def _life(number: int, megabytes: list[float], *, rank: int = 0, plan: str = "ddp") -> Life:
    samples = tuple(
        Sample(100.0 * number + i, 1 + 20 * i, round(mb * 1e6), round(mb * 5e5), 7, 3, 2)
        for i, mb in enumerate(megabytes)
    )
    return Life(rank, number, 1, plan, samples)


def test_growth_is_from_the_first_samples_after_the_warm_up_to_the_last() -> None:
    # The first two samples are of the warm-up. Medians: 400 of 400, 401, 399, and 408 of 407, 408, 412.
    (drift,) = drifts([_life(0, [300, 350, 400, 401, 399, 402, 407, 408, 412])], warm_steps=40)
    assert (drift.begin.resident_bytes, drift.end.resident_bytes) == (400_000_000, 408_000_000)
    assert drift.resident == pytest.approx(0.02)
    assert drift.private == pytest.approx(0.02)


def test_a_life_too_short_for_two_medians_has_no_drift() -> None:
    assert drifts([_life(0, [300, 350, 400, 401, 399, 402, 407]), _life(1, [])], warm_steps=40) == []


def test_lives_are_compared_with_those_of_the_same_rank_and_plan() -> None:
    lives = [
        _life(0, [400.0] * 6),
        _life(3, [404.0] * 6),
        _life(1, [500.0] * 6, plan="zero3"),
        _life(0, [300.0] * 6, rank=1),
    ]
    assert between(drifts(lives, warm_steps=0)) == pytest.approx(0.01)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    life = _life(2, [400.0, 401.0])
    lines = [{"pid": 1, "plan": "ddp"}, *map(asdict, life.samples)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rank-0.life-002.jsonl").write_text(text + '{"seconds": 3')
    assert lives_in(tmp_path) == [life]


def test_a_missing_step_or_another_loss_is_a_gap() -> None:
    assert gap([(1, 2.0), (2, 1.0), (2, 1.0)], [2.0, 1.0]) == 0
    assert gap([(1, 2.0)], [2.0, 1.0]) == float("inf")
    assert gap([(1, 2.0), (2, 1.0), (2, 0.75)], [2.0, 1.0]) == 0.25


def test_kills_come_at_their_times_and_leave_the_last_life_its_time() -> None:
    kills = list(kills_of(0.0, 3600.0, 300.0, random.Random(0)))
    assert len(kills) == 11
    assert all(300 * (i + 1) <= when <= 300 * (i + 1) + 30 for i, (when, _, _) in enumerate(kills))


def test_a_restart_lasts_to_the_first_step_of_the_last_rank() -> None:
    lives = (_life(0, [1.0]), _life(1, [1.0]), _life(1, [1.0], rank=1), _life(2, [1.0]))
    soak = Soak({}, lives, (Kill(90.0, 0, 0, "SIGKILL", 0), Kill(290.0, 2, 0, "SIGTERM", 0)), (), 0)
    assert [soak.restart_seconds(kill) for kill in soak.kills] == [10.0, None]
    assert soak.ended == [1]
