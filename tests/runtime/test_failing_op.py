"""An error of a step without memory says what was asked, where, what was planned and what to change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.failing_op import naming_plan


def test_a_step_without_memory_names_the_priced_peak() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = autopar.compile(model, loss_fn=nn.functional.mse_loss, mesh={"dp": 1})
    x = torch.randn(2, 4)
    made.step(x, x)
    (ready,) = made._kept.ready[True]
    leaf = ready.bound._runner.leaves[0]  # type: ignore[union-attr]
    leaf.register_hook(lambda grad: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="tried to allocate 1152921504606846976 bytes") as raised:
        made.step(x, x)
    (planned,) = [note for note in raised.value.__notes__ if note.startswith("planned:")]
    assert planned.startswith("planned: a peak of ") and planned.endswith(
        " of a rank's memory, optimizer states included"
    )


def test_other_errors_ask_for_no_price() -> None:
    def predicted() -> tuple[float, float]:
        raise AssertionError("nobody asked")

    with pytest.raises(ZeroDivisionError), naming_plan(predicted):
        raise ZeroDivisionError
