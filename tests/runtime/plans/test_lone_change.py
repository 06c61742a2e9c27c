"""A Python value that changes on one rank alone: every rank ends in time with an error that names the value."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.runtime.gloo_ranks import CONTEXT, join
from tests.runtime.models import mean_square

pytestmark = pytest.mark.multiprocess

RANKS, TIMEOUT_SECONDS = 2, 5.0


class Repeated(nn.Module):
    """A layer that is applied `times` times, a number that is built into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(12, 12), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


def lone_change(rank: int, folder: str, recipe: str) -> None:
    """Changes the number on the second rank alone; writes the error of the next step and its delay to a file."""
    join(rank, RANKS, f"{folder}/store")
    torch.manual_seed(0)
    batch = (torch.randn(6, 12), torch.randn(6, 12))
    made = autopar.compile(
        Repeated(), loss_fn=mean_square, mesh={"dp": RANKS}, recipe=recipe, timeout_seconds=TIMEOUT_SECONDS
    )
    made.step(*batch)
    if rank == 1:
        made.times = 2
    start_seconds = time.monotonic()
    try:
        made.step(*batch)
    except (autopar.PeerError, autopar.StepError) as error:
        seconds = time.monotonic() - start_seconds
        Path(folder, f"error{rank}").write_text(f"{seconds}\n{type(error).__name__}: {error}")
    os._exit(0)  # the process groups have a broken collective


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_a_value_that_changes_on_one_rank_is_named_on_all(tmp_path: Path, recipe: str) -> None:
    processes = [CONTEXT.Process(target=lone_change, args=(rank, str(tmp_path), recipe)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    (waited, met), (waited_alone, alone) = (
        (tmp_path / f"error{rank}").read_text().split("\n", 1) for rank in range(RANKS)
    )
    changed = "model.times was 1 and is 2"
    assert met.startswith("PeerError: Step 2 broke in ") and changed in met
    assert "rank 1 runs another program" in met
    assert "Set the same Python values on every rank" in met
    assert alone.startswith("StepError: ") and changed in alone
    assert "Ranks [0] did not come within 5 s" in alone
    assert max(float(waited), float(waited_alone)) < 6 * TIMEOUT_SECONDS
