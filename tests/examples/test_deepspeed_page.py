"""The page for those who come from DeepSpeed: its code runs, its names exist, its lines for a hostfile launch."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.cost_model import find_hardware
from autopar.options import options_of
from autopar.runtime.execute.settings import RunOptions
from autopar.search.request.options import PlanOptions
from autopar.search.request.request import Request

DOCS = Path(__file__).parents[2] / "docs"
TABLES = (DOCS / "coming_from.md").read_text().partition("## DistributedDataParallel")[2]
PAGE = TABLES.partition("## If you come from DeepSpeed")[2]


def _trained_by_torch() -> float:
    """The last loss of the page's loop in plain PyTorch, which accumulates over four micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(10, 64, 16), torch.randint(4, (10, 64))
    for x, y in zip(inputs, labels, strict=True):
        losses = [F.cross_entropy(model(x[i : i + 16]), y[i : i + 16]) for i in range(0, 64, 16)]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(torch.stack(losses).mean())


def test_the_page_trains_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed, names = io.StringIO(), {"__name__": "page"}
    with contextlib.redirect_stdout(printed):
        exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)), names)
    assert f"\n    {printed.getvalue()}" in PAGE
    assert float(names["loss"]) == pytest.approx(_trained_by_torch(), abs=1e-5)
    kept = dict(names["model"].original.named_parameters())["0.weight"]
    torch.testing.assert_close(names["state"]["0.weight"], kept.detach())


class _Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda t: torch.relu(self.up(t)), x, use_reentrant=False)
        return self.down(hidden)


class _Relus(TorchDispatchMode):
    """Counts the calls of relu."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.relu.default
        return func(*args, **(kwargs or {}))


def test_a_checkpointed_call_of_the_model_is_captured_without_its_recomputation() -> None:
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    model = autopar.compile(_Checkpointed(), loss_fn=F.cross_entropy)
    model.step(x, y)
    with _Relus() as planned:
        model.step(x, y)
    plain = _Checkpointed()
    with _Relus() as recomputed:
        F.cross_entropy(plain(x), y).backward()
    assert (planned.count, recomputed.count) == (1, 2)


def _right(page: str) -> list[str]:
    """The right column of all tables of a page."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [" | ".join(row[1:]) for row in rows]


OPTIONS = options_of(PlanOptions, RunOptions)
ELSEWHERE = {"ranks", "options"}  # arguments of `autopar.launch` and of the integrations


def test_every_argument_that_the_tables_name_exists() -> None:
    named = {word for cell in _right(TABLES) for word in re.findall(r"`(\w+)=", cell)}
    known = {*inspect.signature(autopar.compile).parameters} | {*OPTIONS} | ELSEWHERE
    assert len(named) > 5 and named <= known


def test_every_mesh_and_recipe_of_the_tables_is_one() -> None:
    text = "\n".join(_right(TABLES))
    pairs = re.findall(r"mesh=(\{[^}]*\}), recipe=(\{[^}]*\})", text)
    asked = [
        Request(find_hardware("h100"), mesh=ast.literal_eval(mesh), recipe=ast.literal_eval(recipe))
        for mesh, recipe in pairs
        if "..." not in mesh
    ]
    assert asked and all(request.mesh is not None for request in asked)


def test_the_lines_for_a_hostfile_call_every_node(tmp_path: Path) -> None:
    lines = re.search(r"```sh\n(nodes=.*?)```", PAGE, re.S)
    assert lines is not None
    (tmp_path / "hostfile").write_text("node0 slots=8\nnode1 slots=8\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$1: $2" >> {tmp_path}/called\n')
    ssh.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-e", "-c", lines[1]], cwd=tmp_path, env=environment, check=True)
    command = (
        f"cd {tmp_path} && torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint node0:29500 train.py"
    )
    called = (tmp_path / "called").read_text().splitlines()
    assert sorted(called) == [f"node0: {command}", f"node1: {command}"]


def test_zero_2_runs_under_stages() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    batch = torch.randn(8, 8), torch.randn(8, 8)
    found = autopar.verify(
        model, batch, loss_fn=F.mse_loss, mesh={"pp": 2, "dp": 2}, recipe={"pp": "1f1b", "dp": "zero2"}, micro_batches=2
    )
    assert "PASSED" in str(found)
