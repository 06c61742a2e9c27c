"""Mixtures of experts, captured, split and simulated: those of transformers, and dense dispatch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.export import capture_step
from autopar.cost_model import H100
from autopar.cost_model.machines.cluster import Cluster
from autopar.errors import CaptureError
from autopar.explanation.costs import run_of
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh
from autopar.planning.planning import make_plan, prepare_step
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request
from benchmarks.zoo.models import build


def layers(subject):
    return [op for op in subject.prepared.analysis.graph.ops if op.kind == "autopar.analysis.experts"]


def planned(subject, mesh, recipe):
    return make_plan(subject.prepared, Request(H100, mesh=Mesh.parse(mesh), recipe=recipe))


@pytest.fixture(scope="module")
def mixtral():
    return Subject.of(*build("mixtral"))


@pytest.mark.parametrize(
    ("mesh", "recipe", "labels"),
    [
        ("dp=2", "ddp", ("t.0",)),
        ("ep=2", "ep", ("t.0>e",)),
        ("dp=2,ep=2", "dp:zero3,ep:ep", ("t.0", "t.0>e")),
        ("ep=2,tp=2", "ep:ep,tp:tp", ("t.0>e", "d2")),
        ("a=2,b=2", "ep", ("t.0>e", "t.0>e")),
    ],
)
def test_recipes_split_tokens_experts_and_inner_width(mixtral, mesh, recipe, labels):
    plan = planned(mixtral, mesh, recipe)
    assert [plan.ops[op.name] for op in layers(mixtral)] == [labels] * 2
    report = mixtral.compare(plan)
    assert report.passed, report


def test_random_plans_of_qwen_equal_one_device():
    """Random plans with and without stages; those of mixtral are drawn in test_parity.py."""
    qwen = Subject.of(*build("qwen3moe"))
    graph, fingerprint = qwen.prepared.analysis.graph, qwen.prepared.captured.fingerprint
    assert len(layers(qwen)) == 2
    for mesh, seed in (("a=2,b=2", 5), ("pp=2,a=2", 1)):
        plan = random_plan(graph, Mesh.parse(mesh), seed=seed, fingerprint=fingerprint)
        report = qwen.compare(plan)
        assert report.passed, report


def test_split_experts_are_stored_where_they_are_used(mixtral):
    plan = planned(mixtral, "ep=4", "ep")
    stored = {n: how.storage[0] for n, how in plan.parameters.items() if "experts." in n}
    assert len(stored) == 4 and {(s.kind, s.dim) for s in stored.values()} == {("S", 0)}
    others = {how.storage[0].kind for n, how in plan.parameters.items() if "experts." not in n}
    assert others == {"R"}


class Dispatch(nn.Module):
    """GShard's layer: every expert takes at most `capacity` rows of a sequence, by one-hot masks.

    Lepikhin et al., "GShard", 2020, algorithm 1, with one expert a row.
    """

    def __init__(self, width=8, inner=12, experts=4, capacity=4):
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner))
        self.down = nn.Parameter(torch.randn(experts, inner, width))

    def forward(self, x, target):
        share = self.router(x).softmax(-1)  # batch, seq, experts
        chosen = F.one_hot(share.argmax(-1), share.shape[-1])
        place = chosen.cumsum(1) * chosen - 1
        taken = chosen * (place < self.capacity)
        mask = F.one_hot(place.clamp(0, self.capacity - 1), self.capacity) * taken.unsqueeze(-1)
        mask = mask.to(x.dtype)
        rows = torch.einsum("bsec,bsd->ebcd", mask, x)
        y = torch.einsum("ebcd,edf->ebcf", rows, self.up).relu()
        y = torch.einsum("ebcf,efd->ebcd", y, self.down)
        y = torch.einsum("bsec,ebcd->bsd", mask * share.unsqueeze(-1), y)
        return F.mse_loss(x + y, target)


@pytest.fixture(scope="module")
def dispatch():
    torch.manual_seed(0)
    batch = (torch.randn(4, 8, 8).double(), torch.randn(4, 8, 8).double())
    return Subject.of(Dispatch().double(), batch)


@pytest.mark.parametrize(("mesh", "recipe"), [("dp=2", "zero3"), ("ep=2", "ep"), ("dp=2,ep=2", "dp:zero1,ep:ep")])
def test_dense_dispatch_equals_one_device(dispatch, mesh, recipe):
    plan = planned(dispatch, mesh, recipe)
    report = dispatch.compare(plan)
    assert report.passed, report
    if mesh == "ep=2":  # rows change hands: from split by sequence to split by expert, and back
        assert plan.parameters["up"].storage[0].dim == 0
        graph = dispatch.prepared.analysis.graph
        factors = [op.choice(plan.ops[op.name][0]).factor for op in graph.ops if op.kind == "aten.einsum"]
        assert factors == ["batch", "up[0]", "up[0]", "batch"]


def test_a_loop_over_experts_names_the_switch():
    model, batch = build("mixtral")
    model.model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match=r'set_experts_implementation\("grouped_mm"\)') as error:
        capture_step(model, tuple(batch), {}, None)
    assert "for expert_idx in expert_hit" in str(error.value)


class Big(nn.Module):
    """Experts of a large model, behind a matrix that every row meets."""

    def __init__(self, experts=8, slots=2, width=4096, inner=14336):
        super().__init__()
        self.slots, self.first = slots, nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x):
        x, slots = self.first(x), self.slots
        share, chosen = self.router(x).softmax(-1).topk(slots)
        ordered, order = chosen.reshape(-1).sort()
        ends = F.one_hot(ordered, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        y = F.grouped_mm(x[order // slots], self.up, offs=ends).relu()
        y = F.grouped_mm(y, self.down, offs=ends)[order.argsort()]
        return (y.view(len(x), slots, -1) * share.unsqueeze(-1)).sum(1).float().square().mean()


def test_the_search_moves_rows_where_experts_are_heavier():
    """4,096 rows of 8 kB are less than the 1.9 GB of the experts, which stay where they are stored."""
    with torch.device("meta"):
        model, rows = Big().bfloat16(), torch.empty(4096, 4096, dtype=torch.bfloat16)
    prepared = prepare_step(model, (rows,))
    plan = make_plan(prepared, Request(H100, mesh=Mesh.of({"x": 8})))
    (layer,) = (op for op in prepared.analysis.graph.ops if op.kind == "autopar.analysis.experts")
    choice = layer.choice(plan.ops[layer.name][0])
    assert choice.factor == "up[0]"  # experts, and the rows go to them and back
    assert {plan.parameters[n].storage[0].dim for n in ("up", "down")} == {0}
    assert layer.flops == 2 * 4096 * 2 * 2 * 4096 * 14336  # of the rows' experts, not of all


TOKENS, WIDTH, SLOTS, HALF = 65536, 2048, 4, 2  # of a batch; bytes of a number


@pytest.fixture(scope="module")
def many_experts():
    with torch.device("meta"):
        model = Big(experts=64, slots=SLOTS, width=WIDTH, inner=1024).bfloat16()
        rows = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    return prepare_step(model, (rows,))


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_step_sends_what_dispatch_and_combine_do(many_experts, ranks):
    """k tokens d (n - 1) / n numbers there and back, and their gradients, within 5 %."""
    plan = make_plan(many_experts, Request(H100, mesh=Mesh.of({"ep": ranks}), recipe="ep"))
    cluster = Cluster(H100, ranks // 8)
    step = Explanation(many_experts.analysis.graph, plan, cluster, run_of(plan)).step
    sent = sum(x.count * x.traffic_bytes for x in step.items if x.carries == "activation")
    expected = 4 * SLOTS * (TOKENS / ranks) * WIDTH * HALF * (ranks - 1) / ranks
    assert expected <= sent <= 1.05 * expected  # more are the counts of rows, and the loss
    # without an exchange every rank takes the rows of all, and adds up results for all of them
    (layer,) = (x.name for x in many_experts.analysis.graph.ops if "experts" in x.kind)
    request = Request(H100, mesh=Mesh.of({"ep": ranks}), recipe="ep", pins={layer: "e@ep"})
    gathered = make_plan(many_experts, request)
    step = Explanation(many_experts.analysis.graph, gathered, cluster, run_of(gathered)).step
    more = sum(x.count * x.traffic_bytes for x in step.items if x.carries == "activation")
    assert more > ranks / SLOTS * sent
