"""Forwards and losses on pipeline stages that are no step: results of all ranks, and derivatives from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import loss_fn
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.pipeline.staged_runs import compiled, gradients, held, tied_gpt, worst
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


@captured_once()
def forwards() -> tuple[bool, float]:
    model, batch, loss = make("gpt")
    reference, _, _ = make("gpt")
    made = compiled(model, batch, loss)
    made.step(*batch)
    with torch.no_grad():
        results = [made(batch[0]) for _ in range(2)]
        expected = reference(batch[0])
    return torch.equal(*results), (results[0] - expected).abs().max().item()


def test_a_forward_gives_its_result_to_all_ranks(two_ranks: Ranks) -> None:
    for same, error in two_ranks.run(forwards):
        assert same and error < 1e-12


@captured_once()
def losses_outside(schedule: str, mesh: Any, recipe: Any) -> tuple[float, float, str]:
    """Distances of gradients from one process: of two backwards of one result, and of some by `autograd.grad`."""
    model, (tokens, targets), _ = make("gpt")
    reference, _, _ = make("gpt")
    made = compiled(model, (tokens, targets), loss_fn, schedule=schedule, mesh=mesh, recipe=recipe)
    made.step(tokens, targets)
    made.zero_grad()
    for each in (reference, made):
        logits = each(tokens)
        logits.square().mean().backward(retain_graph=True)
        loss_fn(logits, targets).backward()
    far = worst(gradients(made), gradients(reference))
    own = dict(made.named_parameters())
    found = torch.autograd.grad(loss_fn(made(tokens), targets), list(own.values()))
    once = torch.autograd.grad(
        loss_fn(reference(tokens), targets), [dict(reference.named_parameters())[n] for n in own]
    )
    pairs = zip((x.full_tensor() for x in found), once, strict=True)
    with pytest.raises(autopar.StepError) as caught:
        torch.autograd.grad(made(tokens).sum(), list(own.values()), create_graph=True)
    return far, max((a - b).abs().max().item() for a, b in pairs), str(caught.value)


@pytest.mark.parametrize("schedule", often(["1f1b", "interleaved", "zbv"], ["interleaved"]))
def test_a_loss_outside_of_the_model_goes_back_through_the_stages(two_ranks: Ranks, schedule: str) -> None:
    for far, apart, message in two_ranks.run(losses_outside, schedule, None, "auto"):
        assert max(far, apart) < 1e-12
        assert message.startswith("A derivative of a gradient was asked for")


def test_a_loss_outside_of_stages_that_are_sharded(four_ranks: Ranks) -> None:
    for far, apart, _ in four_ranks.run(losses_outside, "interleaved", {"dp": 2}, "zero3"):
        assert max(far, apart) < 1e-12


class TwoHeads(nn.Module):
    """Two results; the second needs the first stage, and one of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8).double() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).relu()
        y = self.b(h).tanh()
        return self.c(y.detach()), self.d(y)


@captured_once()
def of_one_head() -> tuple[float, float]:
    """Distances of the gradients of each result alone; a parameter without a gradient has none."""
    torch.manual_seed(0)
    reference, x = TwoHeads(), torch.randn(8, 8, dtype=torch.float64)
    model = TwoHeads()
    model.load_state_dict(reference.state_dict())
    made = autopar.compile(model, mesh={"pp": 2})
    found = []
    for number in range(2):
        for each in (reference, made):
            each.zero_grad()
            each(x)[number].square().mean().backward()
        want = {n: g for n, g in gradients(reference).items() if n in held(made)}
        own = {n: p.grad.to_local() for n in held(made) if (p := made.get_parameter(n)).grad is not None}  # type: ignore[operator]
        assert own.keys() == want.keys()
        found.append(worst(own, want) if want else 0.0)
    return found[0], found[1]


def test_only_what_a_loss_needs_has_a_gradient_behind_stages(two_ranks: Ranks) -> None:
    for found in two_ranks.run(of_one_head):
        assert max(found) < 1e-12


@captured_once()
def tied_outside() -> str:
    model, (tokens, targets) = tied_gpt()
    made = compiled(model, (tokens, targets), loss_fn)
    made.step(tokens, targets)
    with pytest.raises(autopar.StepError) as caught:
        made(tokens)
    return str(caught.value)


def test_a_loss_outside_of_stages_that_share_a_parameter_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(tied_outside):
        assert "Several pipeline stages use the parameter token_embedding.weight" in message


@captured_once()
def losses_of_evaluation(schedule: str) -> tuple[list[float], bool, float]:
    """The loss without a backward before, between and behind steps; what is left in `.grad`."""
    model, batch, loss = make("gpt")
    made = compiled(model, batch, loss, schedule=schedule)
    with torch.no_grad():
        losses = [made.step(*batch).item()]
    none = not gradients(made)
    losses.append(made.step(*batch).item())
    once = gradients(made)
    with torch.no_grad():
        losses.append(made.step(*batch).item())
    return losses, none, worst(gradients(made), once)


@pytest.mark.parametrize("schedule", often(["1f1b", "interleaved", "zbv"], ["interleaved", "zbv"]))
def test_a_step_under_no_grad_is_the_loss_alone(two_ranks: Ranks, schedule: str) -> None:
    model, batch, loss = make("gpt")
    expected = loss(model(batch[0]), batch[1]).item()  # type: ignore[operator]
    for losses, none, changed in two_ranks.run(losses_of_evaluation, schedule):
        assert losses == pytest.approx([expected] * 3, rel=1e-12)
        assert none and changed == 0
