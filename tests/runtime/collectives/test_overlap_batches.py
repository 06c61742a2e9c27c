"""Micro-batches that take turns, on real ranks: what training comes to, and what travels meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.runtime.collectives import async_collectives
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import compiled, difference, plan_of_part, single, train
from tests.support.staged import captured_once
from tests.support.tables import often

pytestmark = pytest.mark.multiprocess

TP = {"tp": 2}


@pytest.mark.parametrize(
    ("name", "mesh", "recipe", "options"),
    [
        ("gpt", {"tp": 4}, "tp+sp", {}),
        pytest.param("gpt", {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tp"}, {}, marks=pytest.mark.slow),
        ("gpt", {"dp": 2, "tp": 2}, {"dp": "zero2", "tp": "tp+sp"}, {"decompose": "tp"}),
        pytest.param("gpt", {"dp": 2, "tp": 2}, "auto", {"micro_batches": 4}, marks=pytest.mark.slow),
        ("gpt", {"tp": 4}, "tp+sp", {"executor": "aot_eager"}),
        ("routed", {"ep": 4}, "ep", {}),
        ("tied", {"tp": 4}, "tp", {"overlap_batches": 4, "micro_batches": 4}),
    ],
    ids=["tp+sp", "zero3 x tp", "in pieces", "several turns", "compiled", "experts", "four at a time"],
)
def test_ranks_train_as_one_process(
    four_ranks: Ranks, name: str, mesh: dict[str, int], recipe: Any, options: dict[str, Any]
) -> None:
    expected = single(name)
    for found in four_ranks.run(trained, name, mesh, recipe, options):
        assert difference(found, expected) < 1e-9


def trained(name: str, mesh: dict[str, int], recipe: Any, options: dict[str, Any]) -> dict[str, Any]:
    return compiled(name, mesh, recipe, **{"micro_batches": 2, "overlap_batches": 2, **options})


@pytest.mark.parametrize("seed", often(range(2), [0]))
def test_random_plans_train_as_one_process(four_ranks: Ranks, seed: int) -> None:
    """They have all kinds of collectives, all-to-alls among them."""
    expected = single("gpt")
    for found in four_ranks.run(randomly_in_turns, seed):
        assert difference(found, expected) < 1e-9


@captured_once()
def randomly_in_turns(seed: int) -> dict[str, Any]:
    model, batch, loss_fn = make("gpt")
    plan = replace(
        plan_of_part("gpt", {"a": 2, "b": 2}, seed, micro_batches=2, lone_ops=False),
        pipeline=None,
        recompute="none",
        saved={},
        micro_batches=2,
        overlap_batches=2,
    )
    made = autopar.compile(model, loss_fn=loss_fn, plan=plan)  # type: ignore[arg-type]
    return train(made, made.step, batch)


def test_a_collective_starts_before_the_other_micro_batch_computes(two_ranks: Ranks) -> None:
    for events in two_ranks.run(order_of_messages):
        forward, backward = events[: len(events) // 2], events[len(events) // 2 :]
        for found in (forward, backward):
            starts = [found[:i] for i, event in enumerate(found) if event == "s"]
            beside = sum(begun.count("s") > begun.count("e") for begun in starts)
            assert beside >= len(starts) / 3  # while a message of the other micro-batch is under way


@captured_once()
def order_of_messages() -> str:
    """The starts (s) and ends (e) of messages of activations in a step, in their order."""
    events: list[str] = []

    def noting(name: str, event: str) -> Any:
        method = getattr(async_collectives.StartedCollective, name)

        def noted(*args: Any) -> Any:
            events.append(event)
            return method(*args)

        return mock.patch.object(async_collectives.StartedCollective, name, noted)

    model, batch, loss_fn = make("gpt")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=TP, recipe="tp+sp", micro_batches=2, overlap_batches=2)  # type: ignore[arg-type]
    with noting("send", "s"), noting("arrive", "e"), noting("send_back", "s"), noting("arrive_back", "e"):
        made.step(*batch)
    return "".join(events)


def test_a_batch_with_an_odd_number_of_micro_batches_runs_one_at_a_time(two_ranks: Ranks) -> None:
    """A last batch of 6 rows, where the first had 8, is cut into three micro-batches."""
    for first, last, expected in two_ranks.run(of_two_sizes):
        assert first == pytest.approx(expected[0], abs=1e-12)
        assert last == pytest.approx(expected[1], abs=1e-12)


def of_two_sizes() -> tuple[float, float, list[float]]:
    model, batch, loss_fn = make("mlp")
    alone, _, _ = make("mlp")
    made = autopar.compile(model, loss_fn=loss_fn, mesh=TP, recipe="tp", micro_batches=4, overlap_batches=4)  # type: ignore[arg-type]
    short = tuple(x[:6] for x in batch)
    expected = [F.mse_loss(alone(x), y).item() for x, y in (batch, short)]
    return made.step(*batch).item(), made.step(*short).item(), expected


class Masked(nn.Module):
    """A mean over the labels that are there, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.head(self.embedding(tokens)).transpose(1, 2)
        return F.cross_entropy(logits, labels), {"most": logits.amax((1, 2))}


def test_a_mean_over_labels_is_over_all_micro_batches(two_ranks: Ranks) -> None:
    for error in two_ranks.run(masked):
        assert error < 1e-12


def masked() -> float:
    """The largest difference of loss, extra result and gradients from one device's, where labels are missing."""
    torch.manual_seed(0)
    model, alone = Masked().double(), Masked().double()
    alone.load_state_dict(model.state_dict())
    tokens = torch.randint(16, (8, 6))
    labels = torch.where(torch.rand(8, 6) < torch.arange(1, 9)[:, None] / 9, tokens, -100)
    made = autopar.compile(model, mesh=TP, recipe="tp", micro_batches=4, overlap_batches=2)
    (loss, extras), (expected, others) = made.step(tokens, labels), alone(tokens, labels)
    expected.backward()
    pairs = [(loss, expected), (extras["most"], others["most"])]
    pairs += [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_random_ops_draw_anew_for_each(two_ranks: Ranks) -> None:
    for first, second in two_ranks.run(dropped):
        assert first == second != 0


def dropped() -> tuple[float, float]:
    """The loss of two runs of a model with dropout, from the same seed: rows of the halves of a batch are alike."""

    def loss() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
        made = autopar.compile(model, loss_fn=F.mse_loss, mesh=TP, recipe="tp", micro_batches=2, overlap_batches=2)
        return made.step(torch.ones(8, 8), torch.zeros(8, 8)).item()

    return loss(), loss()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"overlap_batches": 2}, "micro_batches=None is not a multiple of that: name micro_batches=2"),
        ({"overlap_batches": 2, "micro_batches": 3}, "micro_batches=3 is not a multiple"),
        ({"overlap_batches": 0}, "overlap_batches=0 is less than 1"),
        ({"overlap_batches": 2, "micro_batches": 2, "recompute": "full"}, "recompute='full', which cannot be combined"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], why: str) -> None:
    model, batch, loss_fn = make("mlp")
    with pytest.raises(AutoparError, match=why):
        autopar.compile(model, example_inputs=batch, loss_fn=loss_fn, recipe="ddp", **options)  # type: ignore[arg-type]


def test_statistics_of_batches_are_refused_by_name() -> None:
    model, batch, loss_fn = make("normed")
    with pytest.raises(PlanError, match=r"updates its buffer .*running_mean"):
        autopar.compile(model, example_inputs=batch, loss_fn=loss_fn, micro_batches=2, overlap_batches=2)  # type: ignore[arg-type]
