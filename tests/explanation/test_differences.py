"""Two plans, in words."""

import json
from dataclasses import replace

import pytest

from autopar.cost_model.machines.cluster import find_cluster
from autopar.errors import PlanError
from autopar.explanation.advice import Question
from autopar.explanation.differences import CostChange, Side, costs, differences, to_json, verdict
from autopar.explanation.pages import page_of
from autopar.explanation.report import used_axes
from autopar.ir import Mesh, Pipeline, Plan
from autopar.search.request.request import Request


@pytest.fixture(scope="module")
def sides():
    found = []
    for recipe in ("zero1", "zero3"):
        request = Request.on(find_cluster("h100x4"), batch=16, stages=(1,), recipe=recipe)
        answer = Question("gpt2", request, 64).answer()
        document = json.loads(json.dumps(page_of(answer, "gpt2").document))
        found.append(Side(f"{recipe}.json", answer.plan, document))
    return found


def test_equal_plans_do_not_differ(sides):
    assert differences(sides[0], sides[0]) == ()
    assert [each.change for each in costs(sides[0], sides[0])] == [0, 0, 0]
    assert "is as fast as" in verdict(sides[0], sides[0])


def test_storage_is_folded_over_layers(sides):
    found = {(d.subject, d.name): d for d in differences(*sides)}
    assert ("recipe", "") in found
    up = found[("parameter", "layers.*.mlp.up.weight")]
    assert up.count == 3
    assert "ZeRO-1@dp" in up.before and "ZeRO" not in up.after
    assert str(up).startswith("parameter layers.*.mlp.up.weight (3x): S(")


def test_costs_are_parts_of_both_documents(sides):
    found = costs(*sides)
    step = next(each for each in found if each.part == "step")
    parts = [each.change for each in found if each.cost == "time" and each is not step]
    assert sum(parts) == pytest.approx(step.change, rel=0.01)
    assert {each.cost for each in found} == {"time", "memory", "traffic"}


def test_a_bare_plan_has_no_costs(sides, tmp_path):
    path = tmp_path / "plan.json"
    sides[0].plan.save(path)
    bare = Side.load(path)
    assert bare.plan == sides[0].plan and costs(bare, sides[1]) == ()
    assert verdict(bare, sides[1]).startswith("plan.json holds a plan without its cost")
    assert any(each.subject == "parameter" for each in differences(bare, sides[1]))


def test_ops_are_told_by_what_they_split(sides):
    one = sides[0]
    name = next(n for n, labels in one.plan.ops.items() if set(labels) - {"-", "~"})
    whole = replace(one.plan, ops={**one.plan.ops, name: ("-",) * len(one.plan.mesh.axes)})
    other = Side("b", whole, {})
    found = [d for d in differences(Side("a", one.plan, {}), other) if d.subject == "op"]
    assert len(found) == 1 and found[0].after == "whole" and " over dp" in found[0].before


def test_the_document_has_units(sides):
    found = to_json(*sides)
    assert all(any(k.startswith("change_") for k in each) for each in found["costs"])
    json.dumps(found)


def test_signs_and_units():
    assert str(CostChange("time", "step", "seconds", 2.0, 1.5)) == "step: 2.00 s -> 1.50 s (-500 ms)"
    assert str(CostChange("memory", "m", "bytes", 1e9, 3e9)) == "m: 1.00 GB -> 3.00 GB (+2.00 GB)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no whole JSON|is not a whole JSON"),
        ("[]", "neither a plan"),
        ('{"plan": 3}', "neither a plan"),
        ('{"plan": {}}', "no field 'version'"),
        ("{}", "no field 'version'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, says):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=says):
        Side.load(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(PlanError, match="Cannot read the plan"):
        Side.load(tmp_path / "none.json")


def test_pipelines_differ_in_schedule_and_cuts(sides):
    plan = sides[0].plan
    one, two = (
        Side(name, replace(plan, pipeline=pipeline), {})
        for name, pipeline in (("a", None), ("b", Pipeline(2, "1f1b", ("linear_4",))))
    )
    said = {str(each) for each in differences(one, two)}
    assert "schedule: none -> 1f1b" in said
    assert "stages begin at: the first op alone -> linear_4" in said
    again = Side("c", replace(plan, recompute="full"), {})
    assert [str(each) for each in differences(one, again)] == ["recompute: none -> full"]


def test_places_stay_vacant_without_the_axes_of_one_rank():
    mesh = Mesh.parse("ps=2,dp=3,tp=1 of 4")
    plan = Plan(mesh=mesh, fingerprint="", recipe="auto", micro_batches=1, parameters={}, inputs={}, ops={})
    assert str(used_axes(plan).mesh) == "ps=2,dp=3 of 4"
