"""What commands and scripts write to stdout, read whole: a library that writes there breaks what reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Every command that takes --json, in one process. A library may write when the process ends.
COMMANDS = """
import contextlib
import sys
from pathlib import Path
from autopar.cli import main

plan, here = sys.argv[1], ["examples.gpt:tiny_example", "--ranks", "2"]
preset = ["gpt2", "--cluster", "h100x2", "--batch", "8", "--seq", "64", "--mesh", "dp=2", "--recipe", "ddp"]
for command in (["explain", *preset, "--save", plan], ["fit", *here], ["compare", *here], ["diff", plan, plan]):
    with contextlib.suppress(SystemExit):  # by which `fit` says no
        main([*command, "--json"], standalone_mode=False)
"""

SCRIPT = """
import os
import sys
import torch
import autopar

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
compiled = autopar.compile(model, loss_fn=torch.nn.functional.mse_loss)
loss = compiled.step(torch.ones(8, 4), torch.zeros(8, 4))
sys.stdout.write(f"rank {os.environ['RANK']} has a loss of one number: {loss.numel() == 1}\\n")
"""


def stdout_of(*arguments: str) -> str:
    """All that a process wrote to stdout until it ended."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_commands_with_json_write_documents_alone(tmp_path: Path) -> None:
    rest = stdout_of("-c", COMMANDS, str(tmp_path / "plan.json"))
    found = []
    while rest.strip():
        value, end = json.JSONDecoder().raw_decode(rest.lstrip())
        found.append(value)
        rest = rest.lstrip()[end:]
    assert [{*each} >= {"step_seconds"} for each in found[:2]] == [True, True]
    assert len(found) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_stdout_is_one_line_on_stderr() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "autopar", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "Error: The output cannot be written: No space left on device.\n"


@pytest.mark.multiprocess
def test_ranks_write_what_their_script_prints(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    written = stdout_of("-m", "autopar", "run", "--ranks", "2", str(script))
    assert sorted(written.splitlines()) == [f"rank {rank} has a loss of one number: True" for rank in (0, 1)]
