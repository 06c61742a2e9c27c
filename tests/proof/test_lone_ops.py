"""Ops that one rank of an axis runs alone, on simulated ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.errors import PlanError
from autopar.ir import Mesh, O, Pipeline, Plan, R, S, State, V, runs_alone
from autopar.planning.planning import prepare_step
from autopar.program.program import build_program
from autopar.program.stages import cut_stages
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from tests.support.towers import Towers, towers_plan

MESH = Mesh.parse("dp=2")


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    batch = (torch.randn(4, 8, dtype=torch.float64), torch.randint(0, 3, (4,)))
    return Subject.of(Towers().double(), batch, loss_fn=torch.nn.functional.cross_entropy)


def plan_of(subject: Subject, owners: dict[str, int], mesh: Mesh = MESH) -> Plan:
    prepared = subject.prepared
    return towers_plan(prepared.analysis.graph, prepared.captured.fingerprint, owners, mesh)


@pytest.mark.parametrize(
    "owners", [{"a": 0, "b": 1}, {"a": 1, "b": 1}, {"a": 0, "b": 1, "head": 0}], ids=["towers", "one rank", "chain"]
)
def test_a_step_of_lone_ops_is_that_of_one_device(subject: Subject, owners: dict[str, int]) -> None:
    plan = Plan.parse(str(plan_of(subject, owners)))
    assert any("@1" in labels for labels in plan.ops.values())
    assert subject.compare(plan).passed


@pytest.mark.parametrize("resident", [R, V], ids=str)
def test_parameters_of_a_tower_may_lie_everywhere(subject: Subject, resident) -> None:
    plan = plan_of(subject, {"a": 0, "b": 1})
    parameters = {name: replace(how, storage=(R,), resident=(resident,)) for name, how in plan.parameters.items()}
    assert subject.compare(replace(plan, parameters=parameters)).passed


def test_a_tower_may_keep_running_statistics() -> None:
    torch.manual_seed(0)
    model = Towers().double()
    model.b[2] = torch.nn.BatchNorm1d(32, dtype=torch.float64)  # whose new statistics all ranks get
    batch = (torch.randn(4, 8, dtype=torch.float64), torch.randint(0, 3, (4,)))
    normed = Subject.of(model, batch, loss_fn=torch.nn.functional.cross_entropy)
    assert normed.compare(plan_of(normed, {"a": 0, "b": 1})).passed


@pytest.mark.parametrize("mesh", ["a=2", "a=4", "a=2,b=2", "a=2,b=2,c=2"])
def test_random_plans_with_lone_ops(subject: Subject, mesh: str) -> None:
    graph, captured = subject.prepared.analysis.graph, subject.prepared.captured
    for seed in range(5):
        plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint, lone_ops=True)
        assert any(map(runs_alone, plan.ops.values()))
        report = subject.compare(plan)
        assert report.passed, str(report)


@pytest.mark.parametrize("mesh", ["pp=2,a=2", "a=2,pp=2,b=2"])
def test_random_plans_with_lone_ops_in_stages(subject: Subject, mesh: str) -> None:
    """Cuts at any op: what one rank of a stage has crosses to the same rank of the next one."""
    graph, captured = subject.prepared.analysis.graph, subject.prepared.captured
    for seed in range(4):
        plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint, lone_ops=True)
        assert plan.pipeline is not None and any(map(runs_alone, plan.ops.values()))
        report = subject.compare(plan)
        assert report.passed, str(report)


def test_a_rank_sends_the_next_stage_nothing_of_what_another_has(subject: Subject) -> None:
    """Rank 1 runs tower b, of which the last op lies on the next stage."""
    plan = plan_of(subject, {"a": 0, "b": 1})
    last = [name for name in plan.ops if name.startswith("linear")][-2]
    plan = replace(plan, pipeline=Pipeline(2, "gpipe", (last,)))
    prepared = subject.prepared
    program = build_program(prepared.captured, prepared.analysis, plan)
    first, second = cut_stages(program, prepared.analysis.graph)
    shapes = {wire.owners: [wire.shape_on(rank, MESH) for rank in (0, 1)] for wire in first.sent}
    assert shapes == {(("dp", 0),): [(4, 4), (0, 4)], (("dp", 1),): [(0, 32), (4, 32)]}
    assert second.received == first.sent
    assert subject.compare(plan).passed


def test_seeds_draw_lone_ops_in_some_plans(subject: Subject) -> None:
    graph, mesh = subject.prepared.analysis.graph, Mesh.parse("a=2,b=2")
    plans = [random_plan(graph, mesh, seed=seed, fingerprint="") for seed in range(30)]
    assert 5 < sum(any(map(runs_alone, plan.ops.values())) for plan in plans) < 15


def test_a_rank_that_is_not_there_is_refused(subject: Subject) -> None:
    plan = plan_of(subject, {"a": 2})
    plan = replace(plan, parameters=plan_of(subject, {}).parameters)
    with pytest.raises(PlanError, match="on one rank \\(@2\\), but the axis dp has 2 ranks"):
        subject.compare(plan)


@pytest.mark.parametrize("stored", [R, S(0), O(1)], ids=str)
def test_a_parameter_that_one_rank_uses_may_be_stored_elsewhere(subject: Subject, stored: State) -> None:
    plan = plan_of(subject, {"a": 0})
    parameters = {
        name: replace(how, storage=(stored,)) if name.startswith("a.") else how for name, how in plan.parameters.items()
    }
    assert {how.resident for name, how in parameters.items() if name.startswith("a.")} == {(O(0),)}
    assert subject.compare(replace(plan, parameters=parameters)).passed


def test_a_rank_that_is_not_there_uses_no_parameter(subject: Subject) -> None:
    plan = plan_of(subject, {})
    parameters = {name: replace(how, resident=(O(2),)) for name, how in plan.parameters.items()}
    with pytest.raises(PlanError, match=r"gives parameter a.0.weight to O\(2\)@dp.* has 2 ranks"):
        subject.compare(replace(plan, parameters=parameters))


def test_what_does_not_go_with_lone_ops_is_refused(subject: Subject) -> None:
    plan = replace(plan_of(subject, {"a": 0}), decomposed=("dp",))
    with pytest.raises(PlanError, match=r"3 of \d+ ops on one rank .* in pieces along dp"):
        subject.compare(plan)


def test_updates_inside_of_a_step_do_not_go_with_lone_ops(subject: Subject) -> None:
    plan = replace(plan_of(subject, {"a": 0}), micro_batches=2, pipeline=Pipeline(2, "2bw", ("linear_4",)))
    with pytest.raises(PlanError, match=r"3 of \d+ ops on one rank .* the schedule 2bw"):
        subject.compare(plan)


def test_an_op_that_draws_random_numbers_is_run_by_all() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5))
    prepared = prepare_step(model, (torch.ones(4, 8),), {}, loss_fn=torch.mean)
    graph = prepared.analysis.graph
    plan = towers_plan(graph, prepared.captured.fingerprint, {"1": 0}, MESH)
    with pytest.raises(PlanError, match="draws random numbers, which all ranks must do together"):
        build_program(prepared.captured, prepared.analysis, plan)
