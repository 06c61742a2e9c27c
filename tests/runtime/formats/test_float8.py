"""Layers that multiply in float8, on real ranks: losses and weights are those of one process that rounds alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture.export import run_with_loss
from autopar.ir import MixedPrecision
from autopar.proof.verdict import nan_last
from tests.runtime.gloo_ranks import Ranks
from tests.support.staged import captured_once

pytestmark = pytest.mark.multiprocess

POLICY = MixedPrecision("float64", product_dtype="float8", exempt=("2",))
CASES: list[dict[str, Any]] = [
    {"mesh": {"dp": 2}, "recipe": "ddp"},
    {"mesh": {"dp": 2}, "recipe": "zero3"},
    {"mesh": {"tp": 2}, "recipe": "tp"},
]
STEPS = 3


def subject() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).double()
    return model, (torch.randn(8, 256).double(), torch.randn(8, 256).double())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process."""
    model, batch = subject()
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        loss = run_with_loss(model, batch, {}, F.mse_loss, POLICY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@captured_once()
def difference(**asked: Any) -> float:
    model, batch = subject()
    made = autopar.compile(copy.deepcopy(model), loss_fn=F.mse_loss, precision=POLICY, **asked)
    optimizer, losses = optimizer_of(made), []
    for _ in range(STEPS):
        losses.append(float(made.step(*batch)))
        optimizer.step()
        optimizer.zero_grad()
    wanted, weights = expected()
    found = {name: x.full_tensor() for name, x in made.state_dict().shards().items()}
    gaps = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    gaps += [(found[name] - x).abs().max().item() for name, x in weights.items()]
    return max(gaps, key=nan_last)


def differences(cases: list[dict[str, Any]]) -> list[float]:
    return [difference(**case) for case in cases]


def test_three_steps_equal_one_process(two_ranks: Ranks) -> None:
    for found in two_ranks.run(differences, CASES):
        assert max(found, key=nan_last) < 1e-9, found
