"""Grouped-query attention on more ranks than key-value heads: two axes in place of the one that is named.

The outer one splits key-value heads to their end, and the inner one the queries of each.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import PlanError
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import mean_square
from tests.runtime.training import difference, full_state

HEADS, KEY_VALUE_HEADS, SIZE = 4, 2, 4
WIDTH = HEADS * SIZE
MESH, RECIPE = {"tp": 2 * KEY_VALUE_HEADS}, "tp"
SPLIT = "parameter query.weight: S(0)@tp S(0.1)@tq | S(0)@tp S(0.1)@tq"


class Grouped(nn.Module):
    """Attention in which two queries share a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, KEY_VALUE_HEADS * SIZE)
        self.value = nn.Linear(WIDTH, KEY_VALUE_HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def example() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 8, WIDTH).double()
    return Grouped().double(), (x, y)


def trained(model: Any, step: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for _ in range(5):
        losses.append(step(*batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **full_state(model)}


def on_ranks() -> tuple[str, dict[str, Any]]:
    model, batch = example()
    made = autopar.compile(model, loss_fn=mean_square, mesh=MESH, recipe=RECIPE, example_inputs=batch)
    return str(made.plan), trained(made, made.step, batch)


@pytest.mark.multiprocess
def test_queries_of_a_head_lie_on_two_ranks_and_train_as_one_process(four_ranks: Ranks) -> None:
    model, batch = example()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_square(model(x), y)
        loss.backward()
        return loss

    expected = trained(model, step, batch)
    for plan, found in four_ranks.run(on_ranks):
        assert "mesh tp=2,tq=2" in plan and SPLIT in plan and "op scaled_dot_product_attention: b0 group" in plan
        assert difference(found, expected) < 1e-9


def test_what_would_lie_in_pieces_is_refused() -> None:
    """Without tp a rank of tq has one of two queries of every head: rows 0 to 3 and 8 to 11."""
    model, batch = example()
    made = autopar.compile(copy.deepcopy(model), loss_fn=mean_square, example_inputs=batch)
    plan = str(made.plan).replace(str(made.plan.mesh), "tq=1")
    plan = plan.replace("query.weight: R | R", "query.weight: S(0.1)@tq | R")
    with pytest.raises(PlanError, match=r"S\(0.1\)@tq, which gives a rank several pieces of a dim"):
        autopar.compile(model, loss_fn=mean_square, example_inputs=batch, plan=autopar.Plan.parse(plan))
