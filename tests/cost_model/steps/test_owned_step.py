"""Steps in which single ranks run ops, by hand: branches side by side cost the longest, chains the sum."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.owners import has_lone_ops
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.cost_model.steps.step import Step
from autopar.ir import Graph, Mesh, Plan
from autopar.pipeline.composed import composed, step_of
from autopar.planning.planning import prepare_step
from autopar.proof.random_plan import random_plan
from tests.search.toy import TOY
from tests.support.towers import towers_plan

MESH = Mesh.parse("dp=2")
ROWS, WIDTH, NARROW, WIDE = 8, 64, 512, 1024
FLOPS = 1e9
# Only products and messages take time on this machine.
MACHINE = replace(
    TOY,
    peak_flops=((8, FLOPS),),
    memory_bytes_per_second=math.inf,
    launch_seconds=0.0,
    inside_node=replace(TOY.inside_node, latency_seconds=0.0),
)
# Forward is a product, and so is backward, which makes the gradient of the weight alone.
A = 2 * 2 * ROWS * WIDTH * NARROW / FLOPS
B = 2 * 2 * ROWS * WIDTH * WIDE / FLOPS


class Branches(nn.Module):
    """Two products on one input. A result of one number is all that leaves a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Branch(NARROW), Branch(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).view(-1)[0]


class Chain(nn.Module):
    """A product on the result of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, NARROW, bias=False), nn.Linear(NARROW, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).view(-1)[0]


def graph_of(model: nn.Module) -> Graph:
    return prepare_step(model, (torch.empty(ROWS, WIDTH),)).analysis.graph


@pytest.fixture(scope="module")
def branches() -> Graph:
    return graph_of(Branches())


def step(graph: Graph, owners: dict[str, int], software: Software = AUTOPAR) -> Step:
    return step_of(graph, planned(graph, owners), MACHINE, software=software)


def planned(graph: Graph, owners: dict[str, int], mesh: Mesh = MESH) -> Plan:
    return towers_plan(graph, "", owners, mesh)


def work(found: Step) -> float:
    """Seconds of a step without the update of the optimizer."""
    return float(found.seconds() - found._optimizer_seconds())


def test_branches_on_two_ranks_cost_the_longer(branches: Graph) -> None:
    assert work(step(branches, {"a": 0, "b": 1})) == pytest.approx(B, rel=1e-3)
    assert work(step(branches, {"a": 1, "b": 0})) == pytest.approx(B, rel=1e-3)


def test_branches_on_one_rank_cost_the_sum(branches: Graph) -> None:
    assert work(step(branches, {"a": 0, "b": 0})) == pytest.approx(A + B, rel=1e-3)
    assert work(step(branches, {})) == pytest.approx(A + B, rel=1e-3)


def test_a_chain_costs_the_sum_and_what_it_sends() -> None:
    graph = graph_of(Chain())
    apart, together = (work(step(graph, {"a": 0, "b": rank})) for rank in (1, 0))
    sent = ROWS * NARROW * 4 / MACHINE.inside_node.bandwidth_bytes_per_second
    assert apart - together == pytest.approx(2 * sent, rel=1e-9)  # there, and its gradient back


def test_a_rank_waits_for_the_other(branches: Graph) -> None:
    found = step(branches, {"a": 0, "b": 1})
    assert isinstance(found, OwnedStep)
    schedule = found.schedule
    assert schedule.busy_seconds[0,] == pytest.approx(A, rel=1e-2)
    assert schedule.waits_seconds[(0,), (1,)] == pytest.approx(B - A, rel=1e-2)
    assert sum(schedule.waits_seconds.values()) == pytest.approx(B - A, rel=1e-2)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_late_host_launches_for_its_own_rank(branches: Graph, runs_ahead: bool) -> None:
    """Every op takes longer to launch than to run; one rank has the ops of one branch, and those of all."""
    software = Software(host_seconds=1.0, runs_ahead=runs_ahead)
    together, apart = (step(branches, owners, software) for owners in ({"a": 0, "b": 0}, {"a": 0, "b": 1}))
    launched = sum(
        i.count for i in apart.items if i.kernels and i.phase in ("forward", "backward") and i.places == ((0, (0,)),)
    )
    assert launched >= 2
    # side by side every rank also launches what drops the input of the other's branch
    assert work(together) - work(apart) == pytest.approx(launched - 1, rel=0.01)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_step_of_all_ranks_has_the_same_price(branches: Graph, runs_ahead: bool) -> None:
    """The schedule of a plan without ops on one rank is the sum that other plans have."""
    software = Software(host_seconds=1e-4, runs_ahead=runs_ahead, hides=0.5)
    graph = branches
    for seed in range(6):
        mesh = Mesh.parse("a=2,b=2")
        plan = random_plan(graph, mesh, seed=seed, fingerprint="", lone_ops=False)
        device = {name: replace(how, tier="device", resident_tier="device") for name, how in plan.parameters.items()}
        plan = replace(plan, parameters=device, saved={}, recompute="none")
        plain = step_of(graph, plan, MACHINE, software=software)
        every = plain.items
        order = sorted(
            (i for i in every if i.every_micro_batch and i.phase in ("forward", "backward", "reduce")),
            key=lambda i: i.phase == "backward",
        )
        found = OwnedStep.of(plain, mesh.names, order, {(0, 0): plain.holdings})
        assert float(found.seconds()) == pytest.approx(float(plain.seconds()), rel=1e-9)


def test_the_memory_is_that_of_the_owner_with_most(branches: Graph) -> None:
    """16 bytes for each of an owner's float32 parameters, and nothing of the other owner's."""
    peaks = [
        composed(branches, planned(branches, owners), MACHINE).peak_bytes
        for owners in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 0})
    ]
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[0] == pytest.approx(16 * WIDTH * NARROW, rel=0.05)
    found = step(branches, {"a": 0, "b": 1})
    assert found.held("parameters", "first") == 4 * WIDTH * WIDE
    assert found.held("optimizer", "first") == 8 * WIDTH * WIDE


def test_ranks_that_are_not_owners_keep_nothing(branches: Graph) -> None:
    found = step_of(branches, planned(branches, {"a": 3, "b": 3}, Mesh.parse("dp=4")), MACHINE)
    assert isinstance(found, OwnedStep)
    held = [rank.held("parameters", "first") for rank in found.ranks.values()]
    assert held == [0, 0, 0, 4 * WIDTH * (NARROW + WIDE)]


def test_random_plans_have_a_price(branches: Graph) -> None:
    """No rank is busy for longer than the step, and the step is no longer than all calls one after another."""
    found = []
    for mesh, seed in itertools.product(("a=2", "a=2,b=2", "a=4"), range(4)):
        plan = random_plan(branches, Mesh.parse(mesh), seed=seed, fingerprint="", lone_ops=True)
        if has_lone_ops(plan):
            found.append(step_of(branches, plan, MACHINE))
    assert len(found) > 6
    for each in found:
        assert isinstance(each, OwnedStep)
        schedule = each.schedule
        one_by_one = sum(max(each._duration(item, at) for at in each.ranks if item.runs_at(at)) for item in each.order)
        busiest = max(schedule.busy_seconds.values())
        assert 0 < busiest <= schedule.makespan_seconds * (1 + 1e-9)
        assert schedule.makespan_seconds <= one_by_one * (1 + 1e-9)
