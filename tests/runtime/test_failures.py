"""What a person sees of a rank that fails under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.runtime import failures

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn

import autopar

def train():
    model = autopar.compile(nn.Linear(8, 8), loss_fn=nn.functional.mse_loss, mesh={"dp": 2}, recipe="ddp")
    FAILS

train()
"""


def shown(folder: Path, fails: str) -> tuple[str, str]:
    """What the ranks print, and torchrun's summary."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("FAILS", fails))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--log-dir", str(folder / "logs"),
        str(script),
    ]  # fmt: skip
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    ranks, _, rest = ran.stderr.partition("torch/distributed/elastic/multiprocessing/api.py")
    return ranks, rest.partition("ChildFailedError")[2]


def test_one_rank_says_what_all_know(tmp_path: Path) -> None:
    ranks, summary = shown(tmp_path, "model.step(torch.ones(4, 8), torch.ones(4, 8), 1, 2, 3)")
    assert ranks.count("[rank 0]") == 1 or ranks.count("[rank 1]") == 1
    assert len(ranks.splitlines()) < 24, ranks
    assert "script.py:11, in train: model.step(" in ranks and "script.py:11" in summary
    whole = Path(re.search(r"all frames: (\S+)", ranks)[1])  # type: ignore[index]
    assert "Traceback (most recent call last)" in whole.read_text()


def test_an_error_of_the_script_is_shown_and_recorded(tmp_path: Path) -> None:
    """On the other rank, which waits, the collective's error is one of autopar's."""
    ranks, summary = shown(
        tmp_path,
        "model.step(torch.ones(4, 8), torch.ones(4, 8)); print(1 / (1 - dist.get_rank()))",
    )
    assert "ZeroDivisionError: division by zero" in ranks and "failures.py" not in ranks
    assert "ZeroDivisionError" in summary and "script.py" in summary


def test_without_torchrun_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook
    failures.show_failures()
    assert sys.excepthook is before


def test_it_is_hooked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    failures.show_failures()
    first = sys.excepthook
    failures.show_failures()
    assert sys.excepthook is first is not sys.__excepthook__


def test_own_frames_are_told_from_those_of_autopar() -> None:
    try:
        failures._record(ValueError("x"))
        raise ValueError("here")
    except ValueError as error:
        (line,) = failures._frames(error)
    assert line.endswith('raise ValueError("here")')
