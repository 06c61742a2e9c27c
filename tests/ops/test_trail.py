"""What a rank called last is in its file, whatever ends the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from autopar.ops import trail
from autopar.ops.collectives import naming_failures
from autopar.ops.trail import FOLDER, Trail, last_collectives


class Calling(nn.Module):
    """A module of a graph that calls a collective."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with naming_failures("all_gather", "group 7"):
            return x.relu()


class Leaves(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trail:
    """The trail of this process as rank 3."""
    found = Trail(tmp_path / "rank-3")
    monkeypatch.setattr("autopar.ops.collectives.trail", lambda: found)
    return found


def test_a_call_is_noted_with_its_step_axis_and_op(own: Trail, tmp_path: Path) -> None:
    model = nn.Sequential(Calling(), Calling())
    graph = fx.GraphModule(model, Leaves().trace(model))
    own.step, own.axes = 5, {"group 7": "tp"}
    graph(torch.ones(2))
    said = "rank 3: the last call of a collective was 2 in step 5, all_gather over axis tp, for _1 of module 1"
    assert list(last_collectives(tmp_path)) == [said]
    with naming_failures("all_reduce", "group 8"):
        pass
    assert list(last_collectives(tmp_path)) == ["rank 3: the last call of a collective was 3 in step 5, all_reduce"]


def test_a_long_name_ends_with_the_file(own: Trail, tmp_path: Path) -> None:
    own.note("x" * 5000, "group")
    own.note("short", "group")
    assert list(last_collectives(tmp_path)) == ["rank 3: the last call of a collective was 2 in step 0, short"]


def test_ranks_with_the_fewest_calls_come_first(tmp_path: Path) -> None:
    for rank, calls in enumerate((10, 9, 10, 0)):
        each = Trail(tmp_path / f"rank-{rank}")
        for _ in range(calls):
            each.note("all_reduce", "group")
    assert list(last_collectives(tmp_path)) == [
        "rank 3: no collective was called",
        "rank 1: the last call of a collective was 9 in step 0, all_reduce",
        "ranks 0, 2: the last call of a collective was 10 in step 0, all_reduce",
    ]


def _killed(folder: str) -> None:
    os.environ |= {FOLDER: folder, "RANK": "0"}
    with naming_failures("all_reduce", "group"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_called_stays(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(str(tmp_path),))
    trail.trail.cache_clear()
    process.start()
    process.join()
    assert list(last_collectives(tmp_path)) == ["rank 0: the last call of a collective was 1 in step 0, all_reduce"]


def test_nothing_is_noted_where_nobody_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, rank in (("", "0"), (str(tmp_path / "gone"), "0"), (str(tmp_path), "")):
        monkeypatch.setenv(FOLDER, folder)
        monkeypatch.setenv("RANK", rank)
        trail.trail.cache_clear()
        assert trail.trail() is None
    trail.trail.cache_clear()
