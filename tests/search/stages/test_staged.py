"""One plan cut into stages: recomputation where memory is tight, and what is not priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.ir import Mesh, Plan
from autopar.pipeline.simulation import StageCosts
from autopar.pipeline.stage_table import StageTable, WholeModel
from autopar.search.stages.balance import balance
from autopar.search.stages.pipeline_bounds import shortest_seconds
from autopar.search.stages.shape import Shape
from autopar.search.stages.staged import Findings, StagedPlan

ONE_RANK = Shape(1, 1, "1f1b", 1)


def table(recompute, seconds: Sequence[float], saved_bytes: float) -> StageTable:
    """A stage of every run of blocks; all of them together save so many bytes."""
    n = len(seconds)
    sums = np.concatenate([[0.0], np.cumsum(np.array(seconds))])
    forward = np.maximum(0, sums[None, :] - sums[:, None])
    saved = np.zeros((n + 1, n + 1))
    saved[0, n] = saved_bytes
    nothing, ends = np.zeros((n + 1, n + 1)), np.zeros(n + 1)
    return StageTable(
        tuple(f"op{i}" for i in range(n)),
        recompute,
        (True,) * n,
        forward,
        nothing,
        nothing,
        nothing,
        nothing,
        saved,
        saved,
        nothing,
        nothing,
        nothing,
        ends,
        ends,
        ends,
        ends,
    )


class Tables:
    """Four blocks of 1 s; each recomputed one takes 1 s more."""

    repeating_blocks = 4
    repetition = SimpleNamespace(groups=("few layers were captured",))
    parts = range(4)
    selectable = ()
    blocks = SimpleNamespace(
        plan=Plan(Mesh((("dp", 1),)), "", "auto", 1, {}, {}, {}), world=Mesh((("pp", 1), ("dp", 1)))
    )

    def __init__(self, saved_bytes: dict) -> None:
        self.saved_bytes = saved_bytes

    def at(self, recompute) -> StageTable:
        number = {"none": 0, "full": 4}.get(recompute, recompute)
        seconds = [2.0] * number + [1.0] * (4 - number)
        return table(recompute, seconds, self.saved_bytes[recompute])

    def costs(self, recompute, cuts, pipeline) -> tuple[StageCosts, ...]:
        return self.at(recompute).stages(cuts)

    def whole(self, recompute) -> WholeModel:
        return self.at(recompute).whole


def staged(bound_bytes: float, known_seconds: float = math.inf) -> StagedPlan:
    """All blocks but one recomputed take least: what all of them take stands beside the last one."""
    tables = Tables({"none": 100.0, 1: 80.0, 2: 60.0, 3: 40.0, "full": 45.0})
    return StagedPlan(tables, 1.0, 0.0, Findings(bound_bytes, known_seconds))


@pytest.mark.parametrize("known_seconds", [math.inf, 20.0])
def test_all_blocks_but_one_are_priced_where_all_of_them_do_not_fit(known_seconds: float) -> None:
    plan = staged(42.0, known_seconds)
    plan.price_shape(ONE_RANK, None)
    ((priced, _),) = plan.findings.ranked
    assert priced.setting.recompute == 3
    assert priced.seconds == 7.0


def test_a_slower_finding_does_not_hide_all_blocks_but_one() -> None:
    plan, slow = staged(42.0), staged(42.0)
    slow.step_seconds = 100.0
    slow.price_shape(ONE_RANK, None)
    plan.findings = slow.findings
    plan.price_shape(ONE_RANK, None)
    assert plan.findings.best_seconds == 7.0


def test_what_is_no_faster_than_a_known_step_is_not_found() -> None:
    plan = staged(42.0, known_seconds=7.0)
    plan.price_shape(ONE_RANK, None)
    assert not plan.findings.priced
    assert plan.findings.has_slower
    assert plan.findings.best_seconds == 7.0


def test_a_block_that_no_stage_recomputes_bounds_no_step() -> None:
    """Blocks of 0.01 s and 3 s, recomputed 0.01 s and 1 s more: with one recomputed a stage takes 3.02 s."""
    recomputed = table(1, [0.02, 4.0], 0.0)
    recomputed.forward_seconds[0, 2] = 3.02
    alone = table("none", [0.01, 3.0], 0.0)
    assert balance(recomputed, ONE_RANK, memory_bytes=math.inf).seconds == 3.02
    assert shortest_seconds(recomputed.whole, ONE_RANK, alone.whole) == 3.02
