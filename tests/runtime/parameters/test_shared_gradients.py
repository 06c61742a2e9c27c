"""Gradients whose memory autograd shares: a collective or a later micro-batch is added to a gradient in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir import O
from autopar.proof.subject import Subject
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import mean_square
from tests.runtime.training import difference

X = torch.linspace(-1, 1, 4 * 4 * 2, dtype=torch.float64).view(4, 4, 2)
OWNERS = {  # what is sent alone, and by rows; a parameter without an owner is summed by an all-reduce
    "two owners": {"a": (0, False), "b": (1, False)},
    "an owner": {"b": (0, False)},
    "an owner by rows": {"a": (0, True), "b": (0, True)},
}


class Halves(nn.Module):
    """Autograd gives its two parameters one gradient, each another view of it, and reads it further."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(8, dtype=torch.float64)) for _ in range(2))
        self.body = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        first = self.body(x) + (self.a.view(1, 4, 2) + self.b.view(1, 4, 2))
        return first.tanh().square().mean()


def gradients(owners: dict[str, tuple[int, bool]], micro_batches: int) -> dict[str, Tensor]:
    """The gradients that this rank has after two steps."""
    torch.manual_seed(0)
    model = Halves()
    asked: dict[str, Any] = {"mesh": {"x": 2}, "recipe": "ddp", "micro_batches": micro_batches}
    plan = autopar.compile(Halves(), example_inputs=(X,), **asked).plan
    kept = {
        name: replace(plan.parameters[name], storage=(O(owner),), by_rows=by_rows)
        for name, (owner, by_rows) in owners.items()
    }
    plan = replace(plan, parameters={**plan.parameters, **kept})
    compiled = autopar.compile(model, example_inputs=(X,), plan=plan)
    for _ in range(2):
        compiled.step(X)
    local = {name: p.grad.to_local() for name, p in model.named_parameters()}
    return {name: gradient.clone() for name, gradient in local.items() if len(gradient)}


@pytest.mark.multiprocess
@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_sum_changes_no_other_gradient(two_ranks: Ranks, owners: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    model = Halves()
    (2 * model(X)).backward()
    for found in two_ranks.run(gradients, OWNERS[owners], micro_batches):
        expected = {name: p.grad for name, p in model.named_parameters() if name in found}
        assert difference(found, expected) < 1e-9


def memories() -> tuple[int, int]:
    """The number of gradients of a step under ZeRO-3, and of the storages that they lie in."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    asked: dict[str, Any] = {"mesh": {"x": 2}, "recipe": "zero3", "micro_batches": 2}
    autopar.compile(model, loss_fn=mean_square, **asked).step(X[:, 0], X[:, 0])
    local = [p.grad.to_local() for p in model.parameters()]
    return len(local), len({x.untyped_storage().data_ptr() for x in local})


@pytest.mark.multiprocess
def test_shards_of_gradients_stay_in_the_buffer_that_brought_them(two_ranks: Ranks) -> None:
    for count, storages in two_ranks.run(memories):
        assert count == 4 and storages < count


def test_a_proof_adds_each_micro_batch_once() -> None:
    model = Halves()
    subject = Subject.of(model, (X[:2],))
    device, batch = subject.single_device(2), ((X[:2],), {})
    once, twice = (device.run([[batch] * count], None)[0].gradients for count in (1, 2))
    assert difference(once, twice) < 1e-9
    assert autopar.verify(model, X[:2], mesh={"dp": 2}, recipe="ddp", micro_batches=2).passed
