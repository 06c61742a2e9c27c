"""Gradients of tables by rows: training is exact, and the bytes that ranks send are those of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.training import difference, train
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

ROWS, WIDTH, ROW = 64, 8, 8 * 8  # ROW: bytes of a row in float64
INDEX = COUNT = 8  # bytes of an index, and of the number of rows


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def made() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model, and a batch with repeated indices whose last two rows are padding alone."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 9, (8, 3))
    tokens[6:] = 0
    return Tagger().double(), (tokens, torch.randint(0, 3, (8, 3)))


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to single ranks."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.size_bytes += sum(x.nbytes for x in args[0])
        return func(*args, **(kwargs or {}))


@captured_once()
def trained(recipe: str, ranks: int, whole: bool = False) -> dict[str, Any]:
    """Ten steps, the gradient of the table, and the bytes that this rank sends to single ranks in a step."""
    model, batch = made()
    compiled = autopar.compile(model, example_inputs=batch, loss_fn=loss_fn, mesh={"x": ranks}, recipe=recipe)
    plan = compiled.plan
    assert plan.parameters["table.weight"].by_rows
    assert not plan.parameters["head.weight"].by_rows
    if whole:
        model, batch = made()
        plan = autopar.Plan.parse(str(plan).replace(" by rows\n", "\n"))
        compiled = autopar.compile(model, example_inputs=batch, loss_fn=loss_fn, plan=plan)
    compiled.step(*batch)
    gradient = compiled.get_parameter("table.weight").grad.to_local().clone()
    compiled.zero_grad()
    with Sent() as sent:
        compiled.step(*batch)
    compiled.zero_grad()
    found = train(compiled, compiled.step, batch, steps=10)
    return {"trained": found, "gradient": gradient, "sent": sent.size_bytes}


def expected() -> dict[str, Any]:
    model, batch = made()

    def step(*batch: Tensor) -> Tensor:
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss.detach()

    return train(model, step, batch, steps=10)


def message(tokens: Tensor) -> int:
    """k (r + 8) + 8 bytes, of the k different indices that are no padding."""
    used = len(set(tokens.flatten().tolist()) - {0})
    return used * (ROW + INDEX) + COUNT


def test_a_gradient_by_rows_is_the_whole_one(two_ranks: Ranks) -> None:
    rows, whole = (two_ranks.run(trained, "data-parallel", 2, each) for each in (False, True))
    assert all(difference(each["trained"], expected()) < 1e-9 for each in (*rows, *whole))
    assert torch.equal(rows[0]["gradient"], whole[0]["gradient"])
    tokens = made()[1][0]
    assert [each["sent"] for each in rows] == [0, message(tokens[4:])]


def test_a_server_gets_rows(two_ranks: Ranks) -> None:
    worker, server = two_ranks.run(trained, "serve", 2)
    assert difference(server["trained"], expected()) < 1e-9
    head = 8 * (3 * WIDTH + 3)  # goes whole
    assert worker["sent"] == head + message(made()[1][0])
    assert server["sent"] == head + ROWS * ROW  # parameters


def test_a_rank_without_an_index_sends_no_row(four_ranks: Ranks) -> None:
    found = four_ranks.run(trained, "data-parallel", 4)
    assert all(difference(each["trained"], expected()) < 1e-9 for each in found)
    parts = made()[1][0].chunk(4)
    assert [each["sent"] for each in found] == [0, *map(message, parts[1:])]
    assert message(parts[3]) == COUNT
