"""The recipe `serve`: one rank of an axis runs all ops, and the others store and update the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model import find_cluster
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.errors import RecipeError
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh, Plan, format_layout
from autopar.pipeline.composed import step_of
from autopar.proof.subject import Subject
from autopar.search.exact.search import search
from autopar.search.request.request import Request
from tests.support.towers import Towers

HARDWARE = find_cluster("h100x2").hardware


class Dropped(Towers):
    """The same with dropout between the towers and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.a.append(nn.Dropout(0.1))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(Towers().double())


def subject_of(model: nn.Module) -> Subject:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8).double(), torch.randint(0, 3, (8,)))
    return Subject.of(model, batch, loss_fn=nn.functional.cross_entropy)


def planned(subject: Subject, mesh: str, recipe: str, **options: Any) -> Plan:
    prepared = subject.prepared
    return search(
        prepared.analysis.graph,
        Mesh.parse(mesh),
        hardware=HARDWARE,
        recipe=recipe,
        fingerprint=prepared.captured.fingerprint,
        **options,
    )


@pytest.mark.parametrize(
    ("mesh", "recipe", "stored", "used"),
    [
        ("ps=2", "serve", "O(1)@ps", "O(0)@ps"),
        ("ps=2,dp=2", "ps:serve,dp:ddp", "O(1)@ps", "O(0)@ps V@dp"),
        ("ps=2,dp=2", "ps:serve,dp:zero1", "O(1)@ps S(0)@dp", "O(0)@ps V@dp"),
        ("dp=2,ps=2", "ps:serve,dp:zero3", "S(0)@dp O(1)@ps", "S(0)@dp O(0)@ps"),
        ("ps=2,dp=2", "ps:serve,dp:parameter-server", "O(1)@ps O(0)@dp", "O(0)@ps V@dp"),
    ],
)
def test_a_step_with_servers_is_that_of_one_device(
    subject: Subject, mesh: str, recipe: str, stored: str, used: str
) -> None:
    plan = planned(subject, mesh, recipe)
    how, axis = plan.parameters["b.0.weight"], plan.mesh.index("ps")
    found = [format_layout(layout, plan.mesh) for layout in (how.storage, how.resident)]
    assert found == [stored, used]
    assert {labels[axis] for labels in plan.ops.values()} == {"@0"}
    assert Plan.parse(str(plan)) == plan
    assert subject.compare(plan).passed


def test_several_servers_share_the_parameters_and_the_worker_has_none(subject: Subject) -> None:
    """Of three ranks; no factor of the model has to divide by three."""
    plan = planned(subject, "ps=3", "serve")
    owners = [how.storage[0].owner for how in plan.parameters.values()]
    assert {*owners} == {1, 2}
    assert subject.compare(plan).passed


# --- fewer servers than workers, on a mesh with vacant places


@pytest.fixture(scope="module")
def twelve() -> Subject:
    """The towers with a batch whose rows three workers can share."""
    torch.manual_seed(0)
    batch = (torch.randn(12, 8).double(), torch.randint(0, 3, (12,)))
    return Subject.of(Towers().double(), batch, loss_fn=nn.functional.cross_entropy)


@pytest.mark.parametrize(
    ("mesh", "inside", "owners"),
    [
        ("ps=2,dp=3 of 4", "dp:ddp", {(1, 0)}),
        ("ps=2,dp=3 of 4", "dp:zero3", {(1, 0)}),
        ("ps=2,dp=3 of 5", "dp:ddp", {(1, 0), (1, 1)}),
        ("ps=3,dp=2 of 5", "dp:ddp", {(1, 0), (1, 1), (2, 0)}),
        ("ps=2,dp=2,tp=2 of 5", "dp:ddp,tp:tp", {(1, 0, 0)}),
    ],
)
def test_fewer_servers_than_workers(twelve: Subject, mesh: str, inside: str, owners: set[tuple[int, ...]]) -> None:
    plan = planned(twelve, mesh, f"ps:serve,{inside}")
    found = [tuple(s.owner for s in how.storage) for how in plan.parameters.values()]
    assert {*found} == owners
    assert Plan.parse(str(plan)) == plan
    assert twelve.compare(plan).passed


def test_one_server_of_four_ranks_holds_all_states_and_the_bytes_are_a_mean_over_four(twelve: Subject) -> None:
    """Of P bytes: the server sends P, worker 0 twice P (on, and back to it), and the two others 2 P (3 - 1) / 3 each.

    The broadcast and the reduce among three workers send 2 P (3 - 1) / 3 of each; there and back to the server P.
    """
    graph, plan = (twelve.prepared.analysis.graph, planned(twelve, "ps=2,dp=3 of 4", "ps:serve,dp:ddp"))
    step = step_of(graph, plan, HARDWARE)
    assert isinstance(step, OwnedStep)
    bytes_ = 8 * sum(p.numel() for p in Towers().parameters())
    states = {at: float(part.held("optimizer", "first")) for at, part in step.ranks.items()}
    assert states == {(0, 0): 0.0, (0, 1): 0.0, (0, 2): 0.0, (1, 0): 2 * bytes_}
    items = [i for i in step.items if i.of in plan.parameters]
    kinds = {"send", "broadcast", "reduce"}
    sent = sum(float(i.count * i.traffic_bytes) for i in items if i.kind in kinds)
    assert sent == pytest.approx((2 * bytes_ + 2 * 2 * bytes_) / 4)


@pytest.mark.parametrize(
    ("mesh", "recipe", "says"),
    [
        ("ps=2,dp=3 of 4", "dp:ddp", "which only the recipe serve supports"),
        ("ps=2,dp=3 of 3", "ps:serve,dp:ddp", "Start at least 4 ranks"),
        ("ps=2,dp=3 of 4", "ps:serve,dp:zero1", "zero1 of the axis dp stores parts"),
    ],
)
def test_who_else_would_need_the_vacant_places_is_said(twelve: Subject, mesh: str, recipe: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        planned(twelve, mesh, recipe)


def test_dropout_needs_all_places() -> None:
    with pytest.raises(RecipeError, match="1 op of the model draw random numbers"):
        planned(subject_of(Dropped().double()), "ps=2,dp=2 of 3", "ps:serve,dp:ddp")


def test_the_worker_holds_no_optimizer_state(subject: Subject) -> None:
    """By price, of n float64 parameters: the server keeps two moments, 2 n x 8 bytes, and the worker none."""
    graph = subject.prepared.analysis.graph
    count = sum(p.numel() for p in Towers().parameters())
    step = step_of(graph, planned(subject, "ps=2", "serve"), HARDWARE)
    assert isinstance(step, OwnedStep)
    assert held(step, "optimizer") == {0: 0.0, 1: 2 * 8 * count}


def held(step: OwnedStep, kind: str) -> dict[int, float]:
    """Rank of the first axis -> bytes of a kind of memory."""
    return {rank[0]: float(part.held(kind, "first")) for rank, part in step.ranks.items()}


def test_worker_and_server_each_hold_the_gradients(subject: Subject) -> None:
    """The worker makes them and sends them; on the server they are `.grad`, which its optimizer reads."""
    graph = subject.prepared.analysis.graph
    count = sum(p.numel() for p in Towers().parameters())
    step = step_of(graph, planned(subject, "ps=2", "serve"), HARDWARE)
    assert isinstance(step, OwnedStep)
    assert held(step, "gradients") == {0: 8 * count, 1: 8 * count}
    alike = step_of(graph, planned(subject, "dp=2", "ddp"), HARDWARE)
    assert step._optimizer_seconds() == pytest.approx(alike._optimizer_seconds())


@pytest.mark.parametrize(("mesh", "recipe"), [("ps=2", "serve"), ("ps=2,dp=2", "ps:serve,dp:zero1")])
def test_a_step_sends_the_mean_over_workers_and_servers(subject: Subject, mesh: str, recipe: str) -> None:
    """Of P bytes on N workers: there and back P / N from each rank, and 2 P (N - 1) / N from each worker alone."""
    plan = planned(subject, mesh, recipe)
    bytes_, workers = 8 * sum(p.numel() for p in Towers().parameters()), plan.mesh.size // 2
    own = {"all_gather", "reduce_scatter", "send"}
    items = [i for i in step_of(subject.prepared.analysis.graph, plan, HARDWARE).items if i.of in plan.parameters]
    sent = sum(float(i.count * i.traffic_bytes) for i in items if i.kind in own)
    assert sent == pytest.approx(bytes_ / workers + bytes_ * (workers - 1) / workers)


def test_ops_that_draw_run_on_servers_too() -> None:
    plan = explained(Dropped()).plan
    assert any("1 op that the recipe leaves to one rank run on all" in note for note in plan.notes)
    assert {"-", "@0"} == {label for labels in plan.ops.values() for label in labels}


def test_a_pin_to_a_server_is_refused(subject: Subject) -> None:
    with pytest.raises(RecipeError, match="the recipe serve runs all ops on rank 0 of this axis"):
        planned(subject, "ps=2", "serve", pins={"a": "@1"})


@pytest.mark.parametrize("mesh", ["ps=2,dp=2", "dp=2,ps=3"])
def test_workers_exchange_batch_statistics_and_servers_skip_that(mesh: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    subject = subject_of(model)
    plan = planned(subject, mesh, "ps:serve,dp:zero1")
    (labels,) = [labels for name, labels in plan.ops.items() if "batch_norm" in name]
    assert {"@0", "d0"} == {*labels}
    assert subject.compare(plan).passed


def test_workers_exchange_the_largest_logits_and_servers_skip_that() -> None:
    """Of a loss over split classes, which requires no gradient of them: on a server it was to have one."""
    torch.manual_seed(0)
    batch = (torch.randn(8, 8).double(), torch.randint(0, 4, (8,)))
    subject = Subject.of(nn.Linear(8, 4).double(), batch, loss_fn=nn.functional.cross_entropy)
    text = str(planned(subject, "ps=2,tp=2", "ps:serve,tp:tp"))
    plan = Plan.parse(text.replace("op cross_entropy_loss: @0 -", "op cross_entropy_loss: @0 n1"))
    assert plan.ops["cross_entropy_loss"] == ("@0", "n1")
    assert subject.compare(plan).passed


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).sum((1, 2))


def test_an_op_that_exchanges_rows_is_refused_without_a_word_of_pins() -> None:
    """Keys and values that go round along cp: a server would have to pass on blocks that it does not have."""
    model = nn.Sequential(nn.Linear(8, 24), Attention()).double()
    batch = (torch.randn(2, 8, 8).double(), torch.randint(0, 4, (2,)))
    subject = Subject.of(model, batch, loss_fn=nn.functional.cross_entropy)
    with pytest.raises(RecipeError, match=r"What the recipe asks of .*attention.*, @0 .*, cannot"):
        planned(subject, "ps=2,cp=2", "ps:serve,cp:cp")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mesh": {"ps": 2}, "recompute": "full"}, "recompute='full'"),
        ({"mesh": {"ps": 2}, "offload": True}, "storage on the host"),
        ({"ranks": 2}, "a mesh that the search chooses, .* give mesh="),
    ],
)
def test_what_servers_cannot_have_yet_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=f"the recipe 'serve', which leaves ops to one rank, and {what}"):
        Request(HARDWARE, recipe="serve", **options)


def test_explain_says_who_works_and_who_stores() -> None:
    text = " ".join(str(explained(Towers())).split())
    assert "rank 0 of ps runs 10 of 10 ops alone" in text
    assert "one rank stores and updates each parameter" in text and "on rank 1" in text


def explained(model: nn.Module) -> Explanation:
    return autopar.explain(
        model,
        (torch.randn(8, 8), torch.randint(0, 3, (8,))),
        mesh={"ps": 2},
        recipe="serve",
        loss_fn=nn.functional.cross_entropy,
        cluster=find_cluster("h100x2"),
    )
