"""Meshes with vacant places, on simulated ranks: what nobody sends is garbage in these."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from autopar.errors import LayoutError, PlanError
from autopar.ir import Layout, Mesh, O, P, Plan, R, S, V, has_all
from autopar.ops.sharding import shard
from autopar.proof.lockstep import convert
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from tests.support.towers import Towers

DIMS = ((12,), (12,))
MESH = Mesh.parse("ps=2,dp=3 of 4")


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    batch = (torch.randn(12, 8, dtype=torch.float64), torch.randint(0, 3, (12,)))
    return Subject.of(Towers().double(), batch, loss_fn=torch.nn.functional.cross_entropy)


@pytest.mark.parametrize("mesh", ["ps=2,dp=3 of 4", "ps=2,dp=3 of 5", "ps=3,dp=2 of 5", "a=2,b=2,c=2 of 5"])
def test_conversions_that_ranks_can_take_are_right_there_and_back(mesh: str) -> None:
    grid = Mesh.parse(mesh)
    states = (R, S(0), S(1), O(0), O(1))
    layouts = list(itertools.product(states, repeat=len(grid.axes)))
    pairs = list(itertools.product(layouts, layouts))[:: 1 if len(grid.axes) == 2 else 17]
    taken = sum(_is_taken(grid, source, target) for source, target in pairs)
    assert 0 < taken < len(pairs)


def _is_taken(mesh: Mesh, source: Layout, target: Layout) -> bool:
    """Whether the conversion is possible; it then has to be right on all ranks."""
    whole = torch.arange(144.0).reshape(12, 12)
    if not (has_all(mesh, source) and has_all(mesh, target)):
        return False
    parts = [shard(whole, DIMS, source, mesh, r).clone().requires_grad_() for r in range(mesh.size)]
    try:
        found = convert(parts, DIMS, source, target, mesh)
    except LayoutError:
        return False
    torch.autograd.backward(found, [shard(whole, DIMS, target, mesh, r) for r in range(mesh.size)])
    for rank in range(mesh.ranks):
        assert torch.equal(found[rank], shard(whole, DIMS, target, mesh, rank)), (source, target)
        assert torch.equal(parts[rank].grad, shard(whole, DIMS, source, mesh, rank)), (source, target)
    return True


def test_partial_sums_of_workers_reach_a_server_and_come_back() -> None:
    """Each of three workers has a part of a gradient: (O(0), P) -> (O(1), O(0)), and its transpose."""
    parts = [torch.full((12, 12), float(rank + 1), requires_grad=True) for rank in range(3)]
    parts += [torch.zeros(0, 12, requires_grad=True) for _ in range(3)]
    found = convert(parts, DIMS, (O(0), P), (O(1), O(0)), MESH)
    assert [x.numel() for x in found[:4]] == [0, 0, 0, 144] and (found[3] == 1 + 2 + 3).all()
    torch.autograd.backward(found, [torch.ones_like(x) for x in found])
    assert all((x.grad == 1).all() for x in parts[:3])


@pytest.mark.parametrize("mesh", ["ps=2,dp=3 of 4", "ps=2,dp=3 of 5", "ps=2,dp=2,tp=2 of 5"])
def test_random_plans(subject: Subject, mesh: str) -> None:
    graph, captured = subject.prepared.analysis.graph, subject.prepared.captured
    for seed in range(4):
        plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=captured.fingerprint)
        assert Plan.parse(str(plan)) == plan
        report = subject.compare(plan)
        assert report.passed, str(report)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": ("-", "b0")}, "splits op linear .*along dp .*places that would get a part are vacant"),
        ({"op": ("@1", "@2")}, "runs op linear .*at a vacant place of the mesh .*"),
        ({"storage": (O(1), O(1))}, "has parameter a.0.weight in O.1.@ps O.1.@dp, but a part of it"),
        ({"storage": (O(0), R)}, "one rank stores it .O on every axis., or all do"),
        (
            {"resident": (V, R)},
            "Parameter a.0.weight of the plan: .*cannot be converted to V@ps on the mesh ps=2,dp=3 of 4",
        ),
    ],
    ids=["split", "op", "owner", "copies", "varied"],
)
def test_a_plan_that_needs_somebody_at_a_vacant_place_is_refused(
    subject: Subject, change: dict[str, Layout], says: str
) -> None:
    graph, captured = subject.prepared.analysis.graph, subject.prepared.captured
    plan = random_plan(graph, MESH, seed=0, fingerprint=captured.fingerprint)
    if labels := change.get("op"):
        plan = replace(plan, ops=dict(plan.ops) | {"linear": labels})
    else:
        how = replace(plan.parameters["a.0.weight"], by_rows=False, **change)
        plan = replace(plan, parameters=dict(plan.parameters) | {"a.0.weight": how})
    with pytest.raises((PlanError, LayoutError), match=says):
        subject.compare(plan)
