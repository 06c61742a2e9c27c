"""Rows that change hands for their experts: what a rank keeps for backward, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.analysis.skew import with_skew
from autopar.cost_model import H100
from autopar.errors import PlanError, RecipeError
from autopar.ir import Mesh, Plan, is_legal
from autopar.ops.sharding import shard
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.program.program import build_program
from autopar.proof.lockstep import run
from autopar.search.request.request import Request
from benchmarks.accuracy.saved_activations import kept_tensors
from tests.support.experts import Routed, routes
from tests.support.price_oracle import price

TWO, FOUR = Mesh.of({"ep": 2}), Mesh.of({"a": 2, "b": 2})


class Loss(nn.Module):
    """A mixture that is told where rows go, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Routed().double()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x, ids).square().mean()


@pytest.fixture(scope="module")
def model() -> Loss:
    torch.manual_seed(0)
    return Loss()


BATCH = (torch.randn(16, 8, dtype=torch.float64), routes("even", 16))


@pytest.fixture(scope="module")
def prepared(model: Loss) -> Prepared:
    return prepare_step(model, BATCH)


def layer_of(prepared: Prepared) -> str:
    (name,) = (op.name for op in prepared.analysis.graph.ops if "experts" in op.kind)
    return name


def planned(prepared: Prepared, labels: str, mesh: Mesh) -> Plan:
    return make_plan(prepared, Request(H100, mesh=mesh, recipe="ep", pins={layer_of(prepared): labels}))


def kept_under(prepared: Prepared, model: Loss, plan: Plan, ids: Tensor) -> list[Tensor]:
    """What the ranks of a plan keep for backward besides parameters and inputs, simulated, for these routes."""
    graph = prepared.analysis.graph
    program, own = (build_program(prepared.captured, prepared.analysis, plan), model.named_parameters())
    layouts = {name: how.resident for name, how in plan.parameters.items()}
    values = {name: x.detach() for name, x in own}
    parameters = [
        [
            shard(values[p.name], graph.tensors[graph.parameters[p.name]].dims, layouts[p.name], TWO, i)
            .clone()
            .requires_grad_()
            for i in range(2)
        ]
        for p in program.parameters
    ]
    given = zip(graph.inputs.items(), (BATCH[0], ids), strict=True)
    inputs = [[shard(x, graph.tensors[t].dims, plan.inputs[name], TWO, i) for i in range(2)] for (name, t), x in given]
    arguments = [*parameters, *([c] * 2 for c in program.constants), *inputs]
    return kept_tensors(lambda: run(program, arguments), [x for ranks in parameters for x in ranks])


def test_evenly_used_experts_keep_what_is_priced(model: Loss, prepared: Prepared) -> None:
    """What has arrived and what was made of it, on each of two ranks, simulated."""
    plan, graph = planned(prepared, "t>e@ep", TWO), prepared.analysis.graph
    kept = kept_under(prepared, model, plan, BATCH[1])
    assert sum(x.untyped_storage().nbytes() for x in kept) == 2 * price(graph, plan, H100).saved_bytes


def test_the_rank_of_the_fullest_experts_keeps_what_is_priced_for_a_skew(model: Loss, prepared: Prepared) -> None:
    """Of 32 rows 24 go to the experts of the second rank, 1.5 times the mean of 16."""
    rows = torch.arange(16)
    ids = torch.stack([2 + rows % 2, torch.where(rows < 8, rows % 2, 3 - rows % 2)], 1)
    plan, graph = planned(prepared, "t>e@ep", TWO), prepared.analysis.graph
    arrived = [x.untyped_storage().nbytes() for x in kept_under(prepared, model, plan, ids) if 24 in x.shape]
    more = price(with_skew(graph, 1.5), plan, H100).saved_bytes - price(graph, plan, H100).saved_bytes
    assert len(arrived) > 3
    assert more == sum(arrived) / 3


def test_rows_that_travel_along_two_axes_are_as_many_as_along_one(prepared: Prepared) -> None:
    def more(labels: str, mesh: Mesh) -> float:
        plan, graph = planned(prepared, labels, mesh), prepared.analysis.graph
        return price(with_skew(graph, 1.5), plan, H100).saved_bytes - price(graph, plan, H100).saved_bytes

    assert more("t>e@a t>e@b", FOUR) == more("t>e@ep", Mesh.of({"ep": 4})) > 0


def test_rows_change_hands_along_all_axes_of_the_experts_or_none(prepared: Prepared) -> None:
    graph = prepared.analysis.graph
    op = graph.by_name[layer_of(prepared)]
    assert is_legal(graph, op, ("t>e", "t>e"), FOUR) and is_legal(graph, op, ("e", "e"), FOUR)
    assert not is_legal(graph, op, ("t>e", "e"), FOUR)
    assert not is_legal(graph, op, ("e", "t>e"), FOUR)
    with pytest.raises(RecipeError, match="only one of the two exchanges its rows"):
        planned(prepared, "t>e@a e@b", FOUR)
    plan = planned(prepared, "t>e@a t>e@b", FOUR)
    mixed = replace(plan, ops={**plan.ops, op.name: ("t>e", "e")})
    with pytest.raises(PlanError, match="along all axes that split the experts"):
        build_program(prepared.captured, prepared.analysis, mixed)


def test_plans_name_the_exchange_in_text(prepared: Prepared) -> None:
    plan = planned(prepared, "t>e@ep", TWO)
    assert f"op {layer_of(prepared)}: t>e" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    (note,) = (line for line in plan.notes if "experts" in line)
    assert "along ep in 1 layer, priced as if all experts were used equally (a guess)" in note
