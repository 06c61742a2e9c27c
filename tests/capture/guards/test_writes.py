"""What forward writes: how often it costs a capture, when it is seen, and what a refusal leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.support.odd.odd_kinds import Counting, Noting, Recording
from tests.support.scripts import Script, by_compile, outcome, squares


def test_a_counter_counts_and_costs_one_capture(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    script = Script(Counting, between=lambda m, i: seen.append(m.calls))
    with caplog.at_level("INFO", "autopar"):
        outcome(script, by_compile)
    assert seen == [0, 1, 2, 3, 4]
    assert "again" not in caplog.text


def test_a_number_that_forward_sets_is_set_in_every_step() -> None:
    seen: list[Any] = []
    outcome(Script(Noting, between=lambda m, i: seen.append(vars(m).pop("width", None))), by_compile)
    assert seen == [None, 4, 4, 4, 4]


def test_a_failed_capture_leaves_no_fake_tensor() -> None:
    model = Recording()
    with pytest.raises(CaptureError):
        autopar.compile(model, loss_fn=squares).step(torch.ones(6, 4), torch.ones(6, 3))
    assert model.means == []


class Recurrent(nn.GRU):
    """Sets `_flat_weights` anew in every forward that finds other weights, as one does that a capture runs."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def test_what_a_forward_sets_before_it_reads_it_costs_no_other_capture(caplog: pytest.LogCaptureFixture) -> None:
    model = autopar.compile(Recurrent(4, 4), loss_fn=F.mse_loss)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)
    with caplog.at_level("INFO", "autopar"):
        for _ in range(3):
            model.step(x, x)
            optimizer.step()
    assert "again" not in caplog.text
