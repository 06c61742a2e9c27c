"""Keys and values that go round: what a rank keeps and sends, what it takes, and the plan as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_model import H100
from autopar.cost_model.compute import OpPrice
from autopar.cost_model.sizes import Sizes
from autopar.errors import SearchError
from autopar.ir import Mesh, Op, Plan, S
from autopar.ops.sharding import shard
from autopar.planning.planning import Prepared, make_plan, prepare_step
from autopar.program.program import build_program
from autopar.proof.lockstep import run
from autopar.search.request.request import Request
from benchmarks.accuracy.saved_activations import kept_bytes
from tests.support.llama import Llama
from tests.support.price_oracle import price

KIND = "aten.scaled_dot_product_attention"
HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Attending(nn.Module):
    """Grouped queries, causal, of a sequence in parts that are parameters."""

    def __init__(self, seq: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        how = {"dtype": dtype, "device": device}
        self.query = nn.Parameter(torch.empty(1, HEADS, seq, WIDTH, **how))  # type: ignore[arg-type]
        self.key = nn.Parameter(torch.empty(1, KV_HEADS, seq, WIDTH, **how))  # type: ignore[arg-type]
        self.value = nn.Parameter(torch.empty(1, KV_HEADS, seq, WIDTH, **how))  # type: ignore[arg-type]
        for x in self.parameters():
            nn.init.normal_(x)

    def forward(self) -> Tensor:
        own = self.query, self.key, self.value
        return F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True).sum()


def prepared(seq: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Prepared:
    return prepare_step(Attending(seq, dtype, device), ())


def planned(of: Prepared, mesh: Mesh, label: str = "q>k") -> Plan:
    """The plan in which all are split along the sequence, and attention runs by `label` on every axis."""
    graph = of.analysis.graph
    plan = make_plan(of, Request(H100, mesh=mesh, pins={"query": f"S(2)@{mesh.names[0]}"}))
    along = tuple(S(2) for _ in mesh.axes)
    stored = {n: replace(p, storage=along, resident=along) for n, p in plan.parameters.items()}
    labels = {attention(of).name: (label,) * len(mesh.axes)}
    ops = {op.name: labels.get(op.name, ("d2",) * len(mesh.axes)) for op in graph.ops}
    return replace(plan, parameters=stored, ops=ops, notes=())


def attention(of: Prepared) -> Op:
    (found,) = (op for op in of.analysis.graph.ops if op.kind == KIND)
    return found


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 4}, {"a": 2, "b": 2}], ids=str)
def test_a_rank_keeps_its_own_part_as_priced(sizes: dict[str, int]) -> None:
    """Query, key, value, result and log-sum-exp of n-th parts; simulated, all ranks keep what one device would."""
    seq, mesh = 16, Mesh.of(sizes)
    of = prepared(seq, torch.float64, "cpu")
    model, plan = Attending(seq, torch.float64, "cpu"), planned(of, mesh)
    graph = of.analysis.graph
    program = build_program(of.captured, of.analysis, plan)
    values = {name: x.detach() for name, x in model.named_parameters()}
    layouts = {name: how.resident for name, how in plan.parameters.items()}
    arguments = [
        [
            shard(values[p.name], graph.tensors[graph.parameters[p.name]].dims, layouts[p.name], mesh, i)
            .clone()
            .requires_grad_()
            for i in range(mesh.size)
        ]
        for p in program.parameters
    ]
    stored = [x for ranks in arguments for x in ranks]
    kept = kept_bytes(lambda: run(program, arguments), stored)
    assert kept == mesh.size * price(graph, plan, H100).saved_bytes
    assert kept == 8 * seq * HEADS * (WIDTH + 1)  # the result and the log-sum-exp; the others are stored


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_long_sequence_is_kept_in_parts(ranks: int) -> None:
    """At 65,536: of bfloat16 the result, and of float32 the log-sum-exp."""
    seq, mesh = 65_536, Mesh.of({"cp": ranks})
    of = prepared(seq)
    saved = price(of.analysis.graph, planned(of, mesh), H100).saved_bytes
    assert saved == seq * HEADS * (2 * WIDTH + 4) // ranks


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_causal_ring_shares_its_work_evenly(ranks: int) -> None:
    """While parts of queries with all keys compute all scores of theirs, of which the unsplit op leaves out half."""
    of = prepared(65_536)
    graph, op = of.analysis.graph, attention(of)

    def seconds(mesh: Mesh, label: str) -> float:
        labels = (label,) * len(mesh.axes)
        return float(OpPrice.of(op, labels, graph.tensors, Sizes(mesh), H100).forward.seconds)

    alone = seconds(Mesh.of({"cp": 1}), "-")
    assert seconds(Mesh.of({"cp": ranks}), "q>k") == pytest.approx(alone / ranks)
    assert seconds(Mesh.of({"cp": ranks}), "q") == pytest.approx(2 * alone / ranks, rel=1e-4)


def test_the_search_takes_a_ring_where_heads_are_few_and_the_sequence_is_long() -> None:
    """Eight ranks split two key-value heads no further, and keys of 65,536 tokens are much to gather."""
    with torch.device("meta"):
        model = Llama(vocab=256, width=256, inner=512, heads=4, kv_heads=2, layers=1).bfloat16()
        batch = torch.zeros(1, 65_536, dtype=torch.int64), torch.zeros(1, 65_536, dtype=torch.int64)
    of = prepare_step(model, batch)
    plan = make_plan(of, Request(H100, mesh=Mesh.of({"x": 8})))
    assert plan.ops[attention(of).name] == ("q>k",)
    (note,) = (line for line in plan.notes if "travel in a ring" in line)
    assert note.startswith("keys and values travel in a ring along x in 1 attention op, priced without overlap")


def test_plans_name_the_ring_in_text() -> None:
    plan = planned(prepared(16), Mesh.of({"cp": 2}))
    assert "scaled_dot_product_attention: q>k" in str(plan)
    assert Plan.parse(str(plan)) == plan and Plan.from_json(plan.to_json()) == plan


class Masked(nn.Module):
    """Attention with a bias for every distance, whose slope is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.slope = nn.Parameter(torch.ones(()))
        self.register_buffer("distances", -(torch.arange(8.0)[:, None] - torch.arange(8.0)).abs())

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.slope * self.distances).square().mean()
        )


def test_what_cannot_go_round_is_split_along_queries() -> None:
    """A bias that requires a gradient: the recipe then gathers keys and values."""
    of = prepare_step(Masked(), (torch.randn(2, 8, 4),))
    assert {c.label for c in attention(of).choices} == {"-", "b1", "b0", "q"}
    plan = make_plan(of, Request(H100, mesh=Mesh.of({"cp": 2}), recipe="cp"))
    assert plan.ops[attention(of).name] == ("q",)


def test_a_model_without_a_sequence_is_refused() -> None:
    of = prepare_step(nn.Linear(8, 8), (torch.randn(4, 8),), loss_fn=torch.sum)
    with pytest.raises(SearchError, match="'the sequence split everywhere; keys and values"):
        make_plan(of, Request(H100, mesh=Mesh.of({"cp": 2}), recipe="cp"))


def test_a_batch_of_one_is_told_of_the_sequence() -> None:
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model = Llama(vocab=32, width=16, inner=32, heads=2, kv_heads=2, layers=1)
    of = prepare_step(model, (tokens, tokens))
    with pytest.raises(SearchError, match="take the recipe 'cp', which splits the sequence, or"):
        make_plan(of, Request(H100, mesh=Mesh.of({"dp": 2}), recipe="ddp"))
