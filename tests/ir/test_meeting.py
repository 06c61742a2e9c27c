"""Meetings of replicas as data: their text, the meshes around them, and plans that have them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autopar.errors import PlanError
from autopar.ir import Meeting, Mesh, ParameterPlan, Pipeline, Plan, R, S, V, mesh_of_all
from autopar.ir.meeting import ALONE, RULES, mesh_of_replica

TEXT = """\
autopar plan 1
mesh far=2,dp=4
model 5be0c1
recipe far:diloco:10,dp:zero3
micro-batches 1
replicas far: every 10 steps diloco momentum=0.9 rate=0.7
parameter up.weight: S(0)@dp | S(0)@dp | step
input tokens: S(0)@dp
op linear_1: b
"""
PLAN = Plan(
    mesh=Mesh.of({"dp": 4}),
    fingerprint="5be0c1",
    recipe="far:diloco:10,dp:zero3",
    micro_batches=1,
    parameters={"up.weight": ParameterPlan((S(0),), (S(0),))},
    inputs={"tokens": (S(0),)},
    ops={"linear_1": ("b",)},
    meeting=Meeting("far", 2, 10, "diloco"),
)


def test_a_plan_with_replicas_is_text_and_json_and_back() -> None:
    assert str(PLAN) == TEXT and Plan.parse(TEXT) == PLAN
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert PLAN.world_mesh == Mesh.parse("far=2,dp=4") and PLAN.replica_mesh == PLAN.mesh


def test_replicas_lie_where_their_axis_is_placed_whatever_the_order() -> None:
    text = TEXT.replace("far=2,dp=4", "far=2,dp=4 order dp,far")
    assert Plan.parse(text) == PLAN  # one axis is left to nest
    text = TEXT.replace("far=2,dp=4", "far=2,dp=4,tp=2 order tp,dp,far")
    plan = Plan.parse(text.replace("op linear_1: b", "op linear_1: - b"))
    assert str(plan.world_mesh) == "far=2,dp=4,tp=2 order far,tp,dp"


def test_replicas_of_a_single_rank_lie_on_a_mesh_of_one() -> None:
    assert mesh_of_replica(Mesh.parse("dp=4"), "dp") == Mesh((ALONE,))
    assert mesh_of_all(Mesh((ALONE,)), Meeting("dp", 4, 1)) == Mesh.parse("dp=4")
    text = TEXT.replace("far=2,dp=4", "far=2").replace("S(0)@dp", "R")
    plan = Plan.parse(text)
    assert str(plan) == text and plan.mesh == Mesh((ALONE,))


@pytest.mark.parametrize(
    ("text", "meeting"),
    [
        ("every 1 step local", Meeting("dp", 2, 1)),
        ("every 4 steps geo", Meeting("dp", 2, 4, "geo")),
        ("every 8 steps diloco momentum=0.5 rate=1.0", Meeting("dp", 2, 8, "diloco", 0.5, 1.0)),
        (
            "every 3 steps async-server owner=O(1) staleness=2",
            Meeting("dp", 2, 3, "async-server", staleness=2, owner=1),
        ),
    ],
)
def test_the_text_of_a_meeting_reads_back(text: str, meeting: Meeting) -> None:
    assert Meeting.parse("dp", 2, text) == meeting and str(meeting) == text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("every 10 steps", "every 0 steps", "synchronise every 0 steps; give a whole number of at least 1"),
        ("every 10 steps", "each 10 steps", "Cannot read 'each 10 steps diloco"),
        ("diloco momentum=0.9 rate=0.7", "diloco", "write 'every 4 steps local'"),
        ("diloco momentum", "geo momentum", "Cannot read"),
        ("diloco momentum=0.9 rate=0.7", "none", "There is no rule 'none'"),
        ("rate=0.7", "rate=x", "are not two numbers"),
        ("momentum=0.9", "momentum=1", "a momentum must be at least 0 and less than 1"),
        ("rate=0.7", "rate=0", "a rate above 0"),
        ("diloco momentum=0.9 rate=0.7", "async-server", "Cannot read 'every 10 steps async-server'"),
        ("diloco momentum", "async-server momentum", "write 'every 4 steps local'"),
        ("diloco momentum=0.9 rate=0.7", "geo owner=O(0) staleness=2", "Cannot read"),
        ("diloco momentum=0.9 rate=0.7", "async-server owner=O(2) staleness=1", "it must be one of O(0) to O(1)"),
        ("diloco momentum=0.9 rate=0.7", "async-server owner=O(0) staleness=1", "is a single rank so far"),
        ("replicas far", "replicas dp", "the replicas must be the first axis of its mesh"),
        (
            "parameter up.weight: S(0)@dp",
            "parameter up.weight: S(0)@far",
            "far is the axis of 2 replicas, whose values differ for 10 steps: none of them can hold a part for "
            "another. Leave @far out",
        ),
        ("replicas far: every", "replicas far: every 1 step local\nreplicas far: every", "gives replicas again"),
        ("| S(0)@dp | step", "| S(0)@dp | step\nreplicas", "Cannot read line 8"),
    ],
)
def test_damaged_replicas_are_named(old: str, new: str, says: str) -> None:
    assert old in TEXT
    with pytest.raises(PlanError) as caught:
        Plan.parse(TEXT.replace(old, new, 1))
    assert says in str(caught.value)


@pytest.mark.parametrize("fields", ["far", ["far"], ["far", 3], [1, "every 4 steps local"]])
def test_replicas_of_damaged_json_are_named(fields: object) -> None:
    with pytest.raises(PlanError, match="The replicas of a plan are an axis and a text such as"):
        Plan.from_json({**PLAN.to_json(), "replicas": fields})


def test_replicas_have_no_stages_and_nothing_on_the_host() -> None:
    with pytest.raises(PlanError, match="2 replicas along far and a pipeline of 2 stages"):
        dataclasses.replace(PLAN, pipeline=Pipeline(2, "1f1b", ("linear_2",)))
    far = {"up.weight": ParameterPlan((R,), (V,), tier="host")}
    with pytest.raises(PlanError, match=r"1 parameter outside the device, such as up\.weight"):
        dataclasses.replace(PLAN, parameters=far)


def test_copies_are_the_base_and_the_momentum() -> None:
    copies = {rule: Meeting("dp", 2, 4, rule).copies for rule in RULES}
    assert copies == {"local": 0, "geo": 1, "diloco": 2, "async-server": 4}  # x, its base and two messages


def test_a_replica_lacks_the_steps_between_exchanges_and_those_of_the_bound() -> None:
    meetings = [Meeting("dp", 2, k, "async-server", staleness=s) for k, s in ((1, 0), (1, 2), (4, 0), (4, 2))]
    assert [each.oldest_steps for each in meetings] == [0, 2, 3, 11]
    with pytest.raises(PlanError, match=r"the rule geo, which has no staleness=2 or owner=O\(1\)"):
        Meeting("dp", 2, 1, "geo", staleness=2, owner=1)
    with pytest.raises(PlanError, match="staleness=-1; give the number of exchanges"):
        Meeting("dp", 2, 1, "async-server", staleness=-1)
