"""Collectives that start early, on real ranks: order forward and backward, and what training comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.collectives.async_collectives import StartedCollective
from tests.runtime.gloo_ranks import Ranks
from tests.runtime.models import make
from tests.runtime.training import drawn
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess


class Branches(nn.Module):
    """Two branches that both end in a sum over ranks under tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.first = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        self.second = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        a, b = self.first(x), self.second(x)
        return (a.sigmoid() + b.sigmoid()).square().mean()


X = torch.arange(32.0).reshape(2, 4, 4).sin()


def test_products_run_between_start_and_wait(two_ranks: Ranks) -> None:
    """Both products of the second branch, forward, and the four of its backward hide the messages of the first."""
    forward = ["mm", "mm", "send", "mm", "mm", "send", "arrive", "arrive"]
    backward = ["send back"] * 2 + (["arrive back"] + ["mm"] * 4) * 2
    expected = Branches()
    loss = expected(X)
    loss.backward()
    for events, found, gradients in two_ranks.run(ordered):
        assert events == forward + backward
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def ordered() -> tuple[list[str], float, dict[str, Tensor]]:
    """The order of messages and products of a step, its loss and gradients."""
    model = autopar.compile(Branches(), example_inputs=(X,), mesh={"tp": 2}, recipe="tp+sp")
    events: list[str] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            events.append(name)
            return method(*args)

        return noted

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                events.append("mm")
            return func(*args, **(kwargs or {}))

    names = {"send": "send", "arrive": "arrive", "send_back": "send back", "arrive_back": "arrive back"}
    with (
        mock.patch.multiple(
            StartedCollective, **{name: noting(word, getattr(StartedCollective, name)) for name, word in names.items()}
        ),
        Products(),
    ):
        loss = model.step(X)
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    return events, loss.item(), gradients


def test_random_plans_start_some_early(four_ranks: Ranks) -> None:
    """What they train to is in `test_random_plans`; here, that the pass has something to do in these plans."""
    assert sum(four_ranks.run(started, "gpt", {"a": 2, "b": 2}, 1)) > 0


@captured_once()
def started(name: str, mesh: dict[str, int], seed: int) -> int:
    """Number of collectives that a step under a random plan starts early."""
    model, batch, loss_fn = make(name)
    made = autopar.compile(model, loss_fn=loss_fn, plan=drawn(name, mesh, seed))  # type: ignore[arg-type]
    with mock.patch.object(StartedCollective, "send", autospec=True, side_effect=StartedCollective.send) as sends:
        made.step(*batch)
    return sends.call_count
