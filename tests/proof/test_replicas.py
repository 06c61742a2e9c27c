"""verify of plans with replicas: right meetings pass, wrong ones fail, and so do wrong programs."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, StepError
from autopar.ir import Meeting
from autopar.ir.order import Order
from autopar.proof.served import fastest_first
from autopar.runtime.replicas.exchange_buffer import ExchangeBuffer
from autopar.runtime.replicas.outer_step import OuterStep
from autopar.runtime.replicas.server_table import ServerTable


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def model_and_rows(rows: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    return model, torch.randn(rows, 8, dtype=torch.float64)


def verified(recipe: Any, mesh: dict[str, int] | None = None, **options: Any) -> Any:
    model, x = model_and_rows()
    return autopar.verify(model, x, mesh=mesh or {"dp": 2}, recipe=recipe, loss_fn=square, **options)


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("local:2", {"dp": 4}),
        ("geo:2", {"dp": 2}),
        ({"far": "diloco:10", "dp": "zero3"}, {"far": 2, "dp": 2}),
        ({"dp": "diloco:1", "tp": "tp"}, {"dp": 2, "tp": 2}),
        ({"far": "diloco:2", "dp": "parameter-server"}, {"far": 2, "dp": 2}),
        ("async-server:0", {"dp": 2}),
        ("async-server:5", {"dp": 4}),
    ],
    ids=str,
)
def test_replicas_equal_plain_ones(recipe: Any, mesh: dict[str, int]) -> None:
    report = verified(recipe, mesh)
    assert report.passed and report.met is not None
    assert report.mesh == autopar.Mesh.of(mesh)


def test_the_report_says_how_replicas_met() -> None:
    text = str(verified("local:10", micro_batches=2))
    assert "2 replicas that synchronise every 10 steps local, 3 of them run" in text
    assert "updated    " in text and "7 steps" in text


def test_statistics_are_met_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    report = autopar.verify(model, x, mesh={"dp": 2}, recipe="local:2", loss_fn=square)
    assert report.passed and report.buffers == 3


def _forgets_the_base(self: OuterStep, name: str, x: Tensor, mean: Tensor) -> None:
    x.copy_(mean)


def _without_nesterov(self: OuterStep, name: str, base: Tensor, gradient: Tensor) -> None:
    base.add_(gradient, alpha=-self.meeting.rate)


@pytest.mark.parametrize(
    ("recipe", "method", "wrong"), [("geo:2", "take", _forgets_the_base), ("diloco:2", "_descend", _without_nesterov)]
)
def test_a_wrong_meeting_fails(recipe: str, method: str, wrong: Any) -> None:
    with mock.patch.object(OuterStep, method, wrong):
        report = verified(recipe)
    assert not report.passed and "parameter" in {v.kind for v in report.failures}


def _without_its_base(self: OuterStep, name: str, x: Tensor) -> Tensor:
    return x.clone()


_PUSH = ServerTable.push


def _sums(self: ServerTable, replica: int, steps: int, changes: ExchangeBuffer) -> None:
    for x in changes.tensors.values():
        x.mul_(self.meeting.replicas)
    _PUSH(self, replica, steps, changes)


def _one_row_less(self: ExchangeBuffer) -> None:
    for name, x in self.tensors.items():
        if x.ndim > 1:
            self.rows[name] = torch.arange(1, len(x))


@pytest.mark.parametrize(
    ("kind", "method", "wrong"),
    [
        (OuterStep, "sent", _without_its_base),
        (ServerTable, "push", _sums),
        (ExchangeBuffer, "keep_changed_rows", _one_row_less),
    ],
)
def test_a_wrong_server_fails(kind: type, method: str, wrong: Any) -> None:
    with mock.patch.object(kind, method, wrong):
        assert not verified("async-server:1").passed


def test_the_order_of_a_proof_goes_to_the_bound() -> None:
    order = fastest_first(2, 2)
    assert order.staleness == 2 and fastest_first(4, 0, steps=3).staleness == 0


def test_a_replay_needs_the_batches_of_all_steps() -> None:
    model, x = model_and_rows()
    with pytest.raises(StepError, match="more than 1 steps of replica 0"):
        autopar.replay(
            model,
            [(x,)],
            "0+1 0= 0+1 meet",
            replicas=2,
            loss_fn=square,
            optimizer_of=lambda m: torch.optim.SGD(m.parameters()),
        )


def test_a_replay_in_half_precision_adds_up_thirds_as_the_server_does() -> None:
    """3/3 + 2/3 = 5/3 lies between 1.6640625 and 1.671875, and 2/3 is rounded up where it gets 16 bits before."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    rows = torch.tensor([[3.0], [2.0], [0.0]]).bfloat16()
    (found, *_) = autopar.replay(
        model,
        [(rows,)],
        "0+1 1+1 meet",
        replicas=3,
        loss_fn=lambda y: -y.mean(),
        optimizer_of=lambda own: torch.optim.SGD(own.parameters(), lr=1.0),
    )
    like = {"weight": torch.zeros(1, 1).bfloat16()}
    table, parcel = (ServerTable(Meeting("dp", 3, 1, "async-server", staleness=1), like), ExchangeBuffer(like))
    for replica, step in (0, 3.0), (1, 2.0):
        parcel.tensors["weight"].fill_(step)
        table.push(replica, 1, parcel)
    table.meet({0: parcel})
    assert found.weight.item() == parcel.tensors["weight"].item() == 1.6640625


def test_a_replay_needs_the_replicas_of_its_order() -> None:
    model, x = model_and_rows()
    with pytest.raises(StepError, match="has 3 replicas, but replicas=2 was given"):
        autopar.replay(
            model,
            [(x,)],
            Order.parse(3, "0+1 meet"),
            replicas=2,
            loss_fn=square,
            optimizer_of=lambda m: torch.optim.SGD(m.parameters()),
        )


def test_a_plan_from_explain_is_verified() -> None:
    model, x = model_and_rows()
    plan = autopar.explain(model, x, mesh={"dp": 2}, recipe="geo:3", loss_fn=square).plan
    edited = dataclasses.replace(plan, meeting=Meeting("dp", 2, 2, "diloco", 0.5, 0.9))
    served = dataclasses.replace(plan, meeting=Meeting("dp", 2, 2, "async-server", staleness=1, owner=1))
    for each in (plan, edited, served, autopar.Plan.parse(str(edited))):
        assert autopar.verify(model, x, mesh={"dp": 2}, plan=each, loss_fn=square).passed
    with pytest.raises(PlanError):
        autopar.verify(model, x[:4], mesh={"dp": 2}, plan=plan, loss_fn=square)
