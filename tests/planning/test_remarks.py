"""Remarks beside the ops of a printed plan: seconds and layouts, which no plan depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.ir import Mesh, Plan
from autopar.pipeline.composed import step_of
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.planning.remarks import op_seconds
from autopar.search.request.request import Request

REQUEST = Request(find_hardware("h100"), mesh=Mesh.of({"dp": 2, "tp": 2}), recipe="dp:ddp,tp:tp")


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.relu(self.up(x))), target)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_step(Toy(), (torch.randn(8, 16), torch.randint(0, 8, (8,))))


@pytest.fixture(scope="module")
def plan(prepared: Prepared) -> Plan:
    return make_plan(prepared, REQUEST)


def test_a_printed_plan_shows_the_layouts_and_seconds_of_every_op(plan: Plan) -> None:
    lines = {line.split(":")[0]: line.partition("  # ")[2] for line in str(plan).splitlines() if line[:3] == "op "}
    assert lines["op linear"].endswith("s  S(0)@dp V@tp, V@dp S(0)@tp, V@dp S(0)@tp -> S(0)@dp S(1)@tp  up")
    assert lines["op linear_1"].endswith("-> S(0)@dp P@tp  down")
    assert len(lines) == len(plan.ops) and all(" -> " in line for line in lines.values())


def test_remarks_are_no_part_of_a_plan(plan: Plan) -> None:
    bare = replace(plan, remarks=None)
    assert Plan.parse(str(plan)) == bare == plan and hash(bare) == hash(plan)
    assert "  # " not in str(bare) and plan.to_json() == bare.to_json()


def test_a_plan_of_other_ops_has_no_remarks(plan: Plan) -> None:
    renamed = replace(plan, ops={f"{name}_of_another": labels for name, labels in plan.ops.items()})
    assert "  # " not in str(renamed)


def test_the_seconds_of_ops_add_up_to_those_of_a_step_that_run_every_micro_batch(
    prepared: Prepared, plan: Plan
) -> None:
    graph = prepared.analysis.graph
    step = step_of(graph, plan, **REQUEST.figures)
    named = {op.name for op in graph.ops}
    found = sum(float(i.count * i.seconds) for i in step.items if i.of in named and i.every_micro_batch)
    assert sum(op_seconds(graph, plan, **REQUEST.figures).values()) == pytest.approx(found)
