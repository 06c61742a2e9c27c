"""A layout with its tier, as text and in a plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autopar.errors import LayoutError
from autopar.ir import Mesh, Plan, R, S, format_place, parse_place
from tests.ir.test_plan import PLAN

MESH = Mesh.parse("dp=2,tp=4")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("R", ((R, R), "device")),
        ("R host", ((R, R), "host")),
        ("S(0)@dp nvme", ((S(0), R), "nvme")),
        ("S(1)@dp S(0)@tp host", ((S(1), S(0)), "host")),
    ],
)
def test_text_is_read_back(text, place):
    assert parse_place(text, MESH) == place
    assert format_place(*place, MESH) == text


def test_the_device_may_be_named_and_an_unknown_memory_may_not():
    assert parse_place("S(0)@dp device", MESH) == ((S(0), R), "device")
    with pytest.raises(LayoutError, match="disk"):
        parse_place("S(0)@dp disk", MESH)


def test_a_plan_keeps_the_tier_of_every_parameter():
    far = {name: dataclasses.replace(how, tier="host") for name, how in PLAN.parameters.items()}
    plan = dataclasses.replace(PLAN, parameters=far)
    assert all(" host | " in line for line in str(plan).splitlines() if "parameter" in line[:9])
    assert Plan.parse(str(plan)) == plan == Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert plan != PLAN
