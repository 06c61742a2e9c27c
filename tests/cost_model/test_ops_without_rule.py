"""What ops without a rule cost: their own time and what makes their operands whole."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.cost_model import Sizes, conversion_seconds, find_hardware, unruled
from autopar.ir import Mesh, ParameterPlan, Plan, R, S, V
from autopar.planning.planning import prepare_step
from autopar.search.request.notes import unruled_lines
from tests.support.price_oracle import price

MACHINE = find_hardware("h100")


class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        return (y * y.histc(4).mean()).sum()


@pytest.fixture(scope="module")
def graph():
    return prepare_step(Histogram(), (torch.randn(8, 64, dtype=torch.float64),)).analysis.graph


def plan(graph, first: str) -> Plan:
    """Over two ranks, the product split along the batch or not at all."""
    labels = {op.name: ("-",) for op in graph.ops} | {"mul": (first,)}
    parameters = {"scale": ParameterPlan((R,), (V if first == "d1" else R,))}
    layout = S(0) if first == "d1" else R
    inputs = dict.fromkeys(graph.inputs, (layout,))
    return Plan(Mesh.of({"x": 2}), "", "", 3, parameters, inputs, labels)


def test_the_gathers_of_operands_are_counted(graph):
    (split,), (whole,) = (unruled(graph, plan(graph, label), MACHINE) for label in ("d1", "-"))
    assert (split.kind, split.count) == (whole.kind, whole.count) == ("aten.histc", 1)
    # y has 8 x 64 numbers of 8 bytes, half of which are elsewhere, and there are 3 micro-batches
    assert (split.gathered_bytes, whole.gathered_bytes) == (3 * 8 * 64 * 8 // 2, 0)
    # the op is as slow, but waits for the gather
    gather = conversion_seconds(graph.tensors["mul"], (S(0),), (R,), sizes=Sizes(Mesh.of({"x": 2})), hardware=MACHINE)
    assert 0 < whole.seconds == pytest.approx(split.seconds - 3 * gather.total)
    assert split.seconds < price(graph, plan(graph, "d1"), MACHINE).seconds


def test_they_are_named_with_what_they_cost(graph):
    (line,) = unruled_lines(graph, plan(graph, "d1"), MACHINE)
    assert "estimated" in line and "aten.histc (1 call, " in line and "6.14 kB gathered)" in line


def test_nothing_is_said_where_all_have_one(graph):
    ruled = replace(graph, ops=tuple(replace(op, has_rule=True) for op in graph.ops))
    assert unruled_lines(ruled, plan(ruled, "d1"), MACHINE) == ()
