"""Stages on machines of several kinds: their lengths, their prices, and laws of both."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autopar.cost_model import Hardware
from autopar.cost_model.machines.kinds import mixed
from autopar.errors import MeshError
from autopar.pipeline.composed import composed
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import simulate
from autopar.pipeline.stage_table import StageTable
from autopar.search.request.request import Request
from autopar.search.stages.balance import balance
from autopar.search.stages.case import Case
from autopar.search.stages.pipeline import search_pipeline
from autopar.search.stages.pipeline_bounds import least_seconds, shortest_seconds
from autopar.search.stages.pipeline_settings import PipelineFound
from autopar.search.stages.shape import Shape
from tests.search.stacked import Sizes, residual
from tests.search.stages.test_balance import table
from tests.search.toy import TOY
from tests.support.machines import times

GRAPH = residual(16, Sizes(batch=4, width=64, hidden=128, vocab=8))


def of_kinds(*factors: float) -> Hardware:
    """A rank of every kind, in nodes of one."""
    return mixed(tuple((times(TOY, each), 1) for each in factors))


def found(hardware: Hardware, graph=GRAPH, mesh: str = "pp=2", **options) -> PipelineFound:
    request = Request(hardware, mesh=mesh, **{"micro_batches": 8, "schedule": "1f1b", "recompute": "none", **options})
    return search_pipeline(Case(graph, request, 8))


def on_ranks(*factors: float, blocks: int = 16) -> StageTable:
    """Blocks of one second on each of some ranks that are so many times as fast."""
    tables = tuple(table([1 / each] * blocks) for each in factors)
    return dataclasses.replace(table([1.0] * blocks), of_ranks=tables)


def test_stages_by_hand() -> None:
    """Rates 3 and 1: 12 and 4 of 16 blocks take 4 seconds each. In the other order the short stage comes first."""
    shape = Shape(2, 1, "1f1b", 4)
    assert balance(on_ranks(3, 1), shape, memory_bytes=np.inf).cuts == (12,)
    assert balance(on_ranks(1, 3), shape, memory_bytes=np.inf).cuts == (4,)
    best = balance(on_ranks(3, 3, 1, 1), Shape(4, 1, "1f1b", 4), memory_bytes=np.inf)
    assert best.cuts == (6, 12, 14)
    assert best.rank_seconds == pytest.approx((2, 2, 2, 2))


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zbv", 2)])
def test_ranks_with_several_stages(schedule: str, chunks: int) -> None:
    shape = Shape(2, chunks, schedule, 4)
    best = balance(on_ranks(3, 1), shape, memory_bytes=np.inf)
    assert best.rank_seconds == pytest.approx((4, 4))


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("factors", [(3, 1), (1, 3), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "zb"])
def test_no_cuts_beat_the_bound_and_executed_ones_are_the_best(
    schedule: str, factors: tuple[int, ...], micro_batches: int
) -> None:
    """Every cut of nine blocks; the bound is that of ranks with the mean rate."""
    shape = Shape(len(factors), 1, schedule, micro_batches)
    made = on_ranks(*factors, blocks=9)
    mean = sum(factors) / len(factors)
    made = dataclasses.replace(table([1 / mean] * 9), of_ranks=made.of_ranks)
    lists = actions(shape.blank, micro_batches)
    steps = {
        cuts: simulate(lists, made.stages(cuts, shape.blank)).step_seconds
        for cuts in itertools.combinations(range(1, 9), shape.stages - 1)
    }
    best = min(steps.values()) * (1 + 1e-9)
    assert shortest_seconds(made.whole, shape, made.whole) <= best
    assert all(least_seconds(made, shape, cuts) <= seconds * (1 + 1e-9) for cuts, seconds in steps.items())
    found = balance(made, shape, memory_bytes=np.inf, executed=True)
    assert steps[found.cuts] <= best


def layers_of(plan: PipelineFound) -> list[int]:
    """Number of layers of every stage."""
    at = [int(name.partition("layers.")[2].split(".")[0]) for name in _modules(plan)]
    return np.diff([0, *at, 16]).tolist()


def _modules(plan: PipelineFound) -> list[str]:
    assert plan.plan.pipeline is not None
    return [GRAPH.by_name[name].module for name in plan.plan.pipeline.cuts]


def test_a_kind_that_is_three_times_as_fast_has_about_three_times_the_layers() -> None:
    fast_first, slow_first = layers_of(found(of_kinds(3, 1))), layers_of(found(of_kinds(1, 3)))
    assert fast_first[0] in (11, 12, 13) and slow_first[1] in (11, 12, 13)
    assert layers_of(found(of_kinds(3, 3, 1, 1), mesh="pp=4"))[0] in (5, 6, 7)


def test_kinds_that_are_equal_are_one_kind() -> None:
    one = dataclasses.replace(TOY, devices_per_node=1)
    alike = mixed(((one, 1), (dataclasses.replace(one, name="twin"), 1)))
    here, there = found(one), found(alike)
    assert dataclasses.replace(there.plan, notes=()) == dataclasses.replace(here.plan, notes=())
    assert there.best.seconds == pytest.approx(here.best.seconds, rel=1e-12)


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2", "tp=2"])
def test_a_faster_kind_never_gives_a_slower_step(mesh: str) -> None:
    """In a pipeline it gives a faster one; ranks with equal shares wait for the slower kind."""
    if mesh == "pp=2":
        steps = [found(of_kinds(1, factor)).best.seconds for factor in (1, 1.5, 2, 4)]
        assert steps == sorted(steps, reverse=True) and steps[-1] < 0.8 * steps[0]
        return
    plan = dataclasses.replace(found(of_kinds(1, 1), mesh=f"pp=1,{mesh}").plan, pipeline=None)
    steps = [composed(GRAPH, plan, of_kinds(1, factor)).step_seconds for factor in (1, 1.5, 2, 4)]
    assert steps == pytest.approx([steps[0]] * 4)
    assert composed(GRAPH, plan, of_kinds(0.5, 1)).step_seconds > 1.2 * steps[0]


def test_the_price_of_a_plan_is_that_of_the_search() -> None:
    hardware = of_kinds(3, 1)
    best = found(hardware).best
    assert composed(GRAPH, best.plan, hardware).step_seconds == pytest.approx(best.seconds)


def test_stages_of_unequal_length_beat_those_of_equal_length() -> None:
    hardware = of_kinds(3, 1)
    equal = found(of_kinds(1, 1)).plan
    assert found(hardware).best.seconds < 0.7 * composed(GRAPH, equal, hardware).step_seconds


def test_open_schedules_and_micro_batches_are_no_slower_than_named_ones() -> None:
    hardware = of_kinds(3, 1)
    free = found(hardware, schedule=None, recompute=None).best.seconds
    assert free <= min(found(hardware, schedule=each).best.seconds for each in ("gpipe", "1f1b")) * (1 + 1e-9)


def test_a_mesh_names_all_ranks_of_the_kinds() -> None:
    with pytest.raises(MeshError, match="x3x1x1\\+x1x1x1 has 2 ranks of 2 kinds, and 4 are asked for"):
        found(of_kinds(3, 1), mesh="pp=2,dp=2")
