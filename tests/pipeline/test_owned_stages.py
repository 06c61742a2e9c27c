"""Stages whose ranks run ops side by side: what two towers on two ranks take, and on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model import find_hardware
from autopar.ir import Graph, Mesh, Pipeline, Plan
from autopar.pipeline.composed import composed
from autopar.planning.planning import prepare_step
from tests.support.stage_costs import costs_of_stages
from tests.support.towers import towers_plan

H100 = find_hardware("h100")
WIDTH = 32_768


class Twice(nn.Module):
    """Two pairs of equal towers, one after the other; each pair is as long as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        return (self.c(y) + self.d(y)).square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model, x = Twice(), torch.empty(8_192, WIDTH)
    return prepare_step(model, (x,), {}, loss_fn=None).analysis.graph


def plan_of(graph: Graph, owners: dict[str, int]) -> Plan:
    plan = towers_plan(graph, "", owners, Mesh.parse("dp=2"))
    return replace(plan, micro_batches=4, pipeline=Pipeline(2, "gpipe", ("linear_2",)))


def test_two_towers_of_a_stage_take_as_long_as_one(graph: Graph) -> None:
    """Up to what the ranks send each other, which is little beside products of this size.

    Backward of the second stage sends the gradient of d's input before c begins, so that there the towers run in turn.
    """
    both = costs_of_stages(graph, plan_of(graph, {"a": 0, "b": 1, "c": 0, "d": 1}), H100)
    chain = costs_of_stages(graph, plan_of(graph, {"a": 0, "b": 0, "c": 1, "d": 1}), H100)
    forward = [a.forward_seconds / b.forward_seconds for a, b in zip(both, chain, strict=True)]
    backward = [a.backward_seconds / b.backward_seconds for a, b in zip(both, chain, strict=True)]
    assert forward == pytest.approx([0.5, 0.5], abs=0.02)
    assert backward == pytest.approx([0.5, 1.0], abs=0.02)


def test_a_step_is_priced_by_the_ranks_side_by_side(graph: Graph) -> None:
    """GPipe of 4 micro-batches: 5 times the slower stage, which takes 1 + 4 products for 2 + 4, and the optimizer."""
    side_by_side, in_turn = (
        composed(graph, plan_of(graph, owners), H100).step_seconds
        for owners in ({"a": 0, "b": 1, "c": 0, "d": 1}, {"a": 0, "b": 0, "c": 1, "d": 1})
    )
    assert 0.75 * in_turn < side_by_side < 0.85 * in_turn


class Classes(nn.Module):
    """A linear layer, and a head whose loss has a transient of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), Head()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(x), target)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4096)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(x), target)


@pytest.mark.parametrize("owner", [0, 1])
def test_the_transient_of_a_loss_counts_on_whichever_rank_runs_it(owner: int) -> None:
    with torch.device("meta"):
        model, x, target = Classes(), torch.empty(512, 64), torch.empty(512, dtype=torch.long)
    graph = prepare_step(model, (x, target), {}, loss_fn=None).analysis.graph
    plan = towers_plan(graph, "", {"body": 1 - owner, "head": owner}, Mesh.parse("dp=2"))
    cut = next(op.name for op in graph.ops if op.module.startswith("head"))
    plan = replace(plan, micro_batches=4, pipeline=Pipeline(2, "gpipe", (cut,)))
    _, last = costs_of_stages(graph, plan, H100)
    assert last.working_bytes >= 512 * 4096 * 4
