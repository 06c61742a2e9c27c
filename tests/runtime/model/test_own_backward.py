"""`loss = model(x, y); loss.backward()`, as it is written for one device, leaves the gradients that `step` leaves."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import PlanError, StepError
from tests.runtime.execute.test_extras import Named, OwnLoss, batch, worst
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess


class Losing(OwnLoss):
    """Returns its loss alone."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, targets)[0]


class Outputs(NamedTuple):
    """A loss and logits under their names, as models of transformers return them."""

    loss: Tensor
    logits: Tensor


class LikeTransformers(OwnLoss):
    """Returns its loss among other things."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Outputs:  # type: ignore[override]
        return Outputs(*super().forward(tokens, labels))


def trained(model: nn.Module) -> Named:
    """Losses and weights of three steps of AdamW, each of two backwards of which one counts half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    found: Named = {}
    for number in range(3):
        for weight in (1.0, 0.5):
            loss = model(*batch())
            (weight * loss).backward()
        found[f"loss {number}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return found | {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in weights.items()}


@captured_once()
def on_a_rank(options: dict[str, Any], planned: bool = False) -> Named:
    if planned:  # by a plan of a step, before any step
        options = {"plan": autopar.compile(Losing(), example_inputs=batch(), **options).plan}
    return trained(autopar.compile(Losing(), **options))


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, accumulation": (1, {"micro_batches": 4}),
    "dp": (2, {"mesh": {"dp": 2}, "recipe": "ddp"}),
    "zero3, accumulation": (2, {"mesh": {"dp": 2}, "recipe": "zero3", "micro_batches": 4}),
    "tp": (2, {"mesh": {"tp": 2}, "recipe": "tp"}),
    "pp": (2, {"mesh": {"pp": 2}, "micro_batches": 4}),
    "dp x tp": (4, {"mesh": {"dp": 2, "tp": 2}, "recipe": {"dp": "zero3", "tp": "tp"}}),
    "pp x dp": (4, {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2}),
}


ALWAYS = {*((way, "searched") for way in WAYS), ("zero3, accumulation", "planned"), ("pp", "planned")}


@pytest.mark.parametrize(("way", "plan"), often(itertools.product(WAYS, ("searched", "planned")), ALWAYS))
def test_training_by_backward_is_that_of_one_device(way: str, plan: str, two_ranks: Ranks, four_ranks: Ranks) -> None:
    count, options = WAYS[way]
    expected = trained(Losing())
    ranks = {2: two_ranks, 4: four_ranks}
    results = (
        ranks[count].run(on_a_rank, options, plan == "planned")
        if count > 1
        else [on_a_rank(options, plan == "planned")]
    )
    assert {name for found in results for name in found} == expected.keys()
    for found in results:
        assert worst(found, {name: expected[name] for name in found}) < 1e-9


@captured_once()
def of_a_result(options: dict[str, Any]) -> tuple[float, str]:
    made = autopar.compile(LikeTransformers(), **options)
    tokens, labels = batch()
    out = made(tokens, labels=labels)
    out.loss.backward()
    try:
        said = str(list(out.logits.shape))
    except StepError as error:
        said = str(error)
    return out[0].item(), said


def test_the_loss_among_other_results(two_ranks: Ranks) -> None:
    expected = Losing()(*batch()).item()
    ((whole, shape),) = {of_a_result({})}
    assert whole == pytest.approx(expected, rel=1e-12) and shape == "[8, 4, 16]"
    for loss, said in two_ranks.run(of_a_result, {"mesh": {"pp": 2}, "micro_batches": 2}):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert said.startswith("The result of model(...) has only its loss, and no logits")


def test_gradients_arrive_when_backward_runs_and_not_before() -> None:
    made = autopar.compile(Losing(), micro_batches=2)
    loss = made(*batch())
    assert all(p.grad is None for p in made.parameters())
    weights = list(made.parameters())
    asked = torch.autograd.grad(loss, weights)
    assert all(p.grad is None for p in weights)
    plain = Losing()
    expected = torch.autograd.grad(plain(*batch()), list(plain.parameters()))
    differences = [(a - b).abs().max().item() for a, b in zip(asked, expected, strict=True)]
    assert max(differences) < 1e-12


def test_a_second_backward_is_refused() -> None:
    loss = autopar.compile(Losing(), micro_batches=2)(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match="the first has taken its gradients"):
        loss.backward()


def test_a_gradient_of_another_result_is_refused() -> None:
    loss, logits = autopar.compile(OwnLoss(), micro_batches=2)(*batch())
    with pytest.raises(StepError, match="arrives at a result of model"):
        (loss + logits.sum()).backward()


def test_what_follows_a_model_without_a_loss_is_differentiated_as_always() -> None:
    class Logits(OwnLoss):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens, tokens)[1]

    found, expected = autopar.compile(Logits(), micro_batches=2), Logits()
    for model in (found, expected):
        model(batch()[0]).square().mean().backward()
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    assert max((p.grad - q.grad).abs().max().item() for p, q in pairs) < 1e-12


@captured_once()
def early_forward(mesh: dict[str, int], recipe: str) -> tuple[float, float, bool]:
    """A forward before the first step, under a plan of a step; then the loss of a step."""
    plain = OwnLoss()

    def loss_of(result: tuple[Tensor, Tensor]) -> Tensor:
        return result[0]

    plan = autopar.compile(
        OwnLoss(), loss_fn=loss_of, mesh=mesh, recipe=recipe, micro_batches=2, example_inputs=batch()
    ).plan
    made = autopar.compile(plain, loss_fn=loss_of, plan=plan)
    with torch.no_grad():
        before = made(*batch())[0].item()
    after = made.step(*batch()).item()
    return before, after, made.plan.parameters == plan.parameters


@pytest.mark.parametrize("recipe", often(["ddp", "zero3"], ["zero3"]))
def test_a_forward_may_come_before_the_first_step_of_a_plan(recipe: str, two_ranks: Ranks) -> None:
    expected = Losing()(*batch()).item()
    for before, after, is_kept in two_ranks.run(early_forward, {"dp": 2}, recipe):
        assert (before, after) == pytest.approx((expected, expected), rel=1e-12)
        assert is_kept


def early_forward_of_stages() -> str:
    try:
        early_forward({"pp": 2}, "auto")
    except PlanError as error:
        return str(error)
    return "no error"


def test_before_the_first_step_of_a_plan_with_stages_a_forward_says_what_to_do(two_ranks: Ranks) -> None:
    for said in two_ranks.run(early_forward_of_stages):
        assert "Give example_inputs=... to autopar.compile" in said
