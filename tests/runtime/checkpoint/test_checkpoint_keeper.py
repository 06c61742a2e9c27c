"""The checkpoints of a loop: written beside it, kept in number, and found again after accidents."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture.export import run_with_loss
from autopar.runtime.checkpoint.checkpoint import Checkpoints, load_checkpoint
from tests.runtime.gloo_ranks import Ranks, equal_on_all
from tests.runtime.models import make
from tests.support.staged import captured_once


class Counted:
    """A loader of random batches that can go on from any of them."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> Tensor:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        return torch.randn(4, 8, dtype=torch.float64, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Counted]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), Counted()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Counted) -> float:
    """A step on one process, with noise of every generator; returns its loss."""
    noise = random.random() + np.random.rand()
    loss = (model(loader.next()) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def saved_steps(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its data, its dropout and the noise of Python and numpy, too."""
    model, optimizer, loader = parts()
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 4):
            train(model, optimizer, loader)
            checkpoints.save(step, model, optimizer, loader=loader, at=f"step {step}")
        expected = [train(model, optimizer, loader) for _ in range(3)]
    model, optimizer, loader = parts()
    last = Checkpoints(tmp_path).load_last(model, optimizer, loader=loader)
    assert (last.step, last.extra) == (3, {"at": "step 3"})
    assert [train(model, optimizer, loader) for _ in range(3)] == expected


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    model, optimizer, loader = parts()
    last = Checkpoints(tmp_path / "new").load_last(model, optimizer, loader=loader)
    assert (last.step, last.extra, last.path) == (0, {}, None)


def test_the_last_are_kept_and_each_is_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (5, 10, 15, 20):
            checkpoints.save(step, model, optimizer, epoch=step)
    assert saved_steps(tmp_path) == ["step-00000015", "step-00000020"]
    assert load_checkpoint(tmp_path / "step-00000015", model, optimizer) == {"epoch": 15}
    with pytest.raises(autopar.AutoparError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(autopar.AutoparError, match="step=-1: give the number of steps made so far"):
        checkpoints.save(-1, model, optimizer)  # which `load_last` would not find


def test_folders_and_files_of_other_programs_stay(tmp_path: Path) -> None:
    """Other programs number their folders alike, and people put their own files beside a checkpoint's."""
    model, optimizer, _ = parts()
    others = [tmp_path / "step-00000001" / "lit_model.pth", tmp_path / "step-00000002" / "state.pt"]
    others += [tmp_path / "step-00000003.partial" / "log.txt", tmp_path / "step-00000004" / "tokenizer.json"]
    for file in others[:3]:
        file.parent.mkdir()
        file.write_text("mine")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (4, 5, 6):
            checkpoints.save(step, model, optimizer)
            checkpoints.finish()
            others[3].write_text("mine") if step == 4 else None
        assert checkpoints.load_last(model, optimizer).step == 6
    assert [file.read_text() for file in others] == ["mine"] * 4
    assert saved_steps(tmp_path) == [*(file.parent.name for file in others), "step-00000006"]
    assert os.listdir(others[3].parent) == ["tokenizer.json"]


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have the values of the moment of the save; the checkpoint counts when they are written."""
    model, optimizer, loader = parts()
    train(model, optimizer, loader)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    go_on, sync = threading.Event(), os.fsync
    monkeypatch.setattr("os.fsync", lambda number: (go_on.wait(20), sync(number)))
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):  # the second save copies into the memory of the first
        checkpoints.save(step, model, optimizer)
        train(model, optimizer, loader)
        if step == 1:
            assert saved_steps(tmp_path) == ["step-00000001.partial"]
        go_on.set()
    checkpoints.finish()
    load_checkpoint(tmp_path / "step-00000001", model)
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    load_checkpoint(tmp_path / "step-00000002", model)
    assert not all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())


def shorten(folder: Path) -> None:
    (file,) = folder.glob("shard-*")
    os.truncate(file, file.stat().st_size - 8)


def empty(folder: Path) -> None:
    (folder / "state.pt").write_bytes(b"")


def flip(folder: Path) -> None:
    (file,) = folder.glob("shard-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("accident", [shorten, empty, flip])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, accident: Callable[[Path], None]) -> None:
    model, optimizer, _ = parts()
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, model, optimizer)
    checkpoints.finish()
    accident(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=r"step-00000002 is damaged.*set aside as step-00000002\.damaged") as caught:
        assert checkpoints.load_last(model, optimizer).step == 1
    assert caught[0].filename == __file__
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002.damaged"]
    checkpoints.save(2, model, optimizer)
    checkpoints.finish()
    accident(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=r"set aside as step-00000002\.damaged-2"):
        assert checkpoints.load_last(model, optimizer).step == 1
    aside = ["step-00000002.damaged", "step-00000002.damaged-2"]
    accident(tmp_path / "step-00000001")
    expected = r"Every checkpoint in .* is damaged.*step-00000001 is damaged"
    for _ in range(2):  # a second start does not begin anew over what is there
        with pytest.raises(autopar.AutoparError, match=expected):
            checkpoints.load_last(model, optimizer)
    assert saved_steps(tmp_path) == ["step-00000001", *aside]


def test_a_checkpoint_of_another_version_is_not_damaged(tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, model, optimizer)
    checkpoints.finish()
    notes = torch.load(tmp_path / "step-00000002" / "state.pt", weights_only=True)
    torch.save(notes | {"version": 99}, tmp_path / "step-00000002" / "state.pt")
    with pytest.raises(autopar.AutoparError, match="is of version 99, but this autopar reads"):
        checkpoints.load_last(model, optimizer)
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000002"]


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_is_raised_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = parts()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    checkpoints.finish()
    monkeypatch.setattr("os.fsync", full)
    checkpoints.save(2, model, optimizer)
    expected = r"Saving .*step-00000002 failed on rank 0\. OSError.*No space left"
    with pytest.raises(autopar.AutoparError, match=expected):
        checkpoints.save(3, model, optimizer)
    monkeypatch.undo()
    assert checkpoints.load_last(model, optimizer).step == 1
    checkpoints.save(4, model, optimizer)
    checkpoints.finish()
    assert saved_steps(tmp_path) == ["step-00000001", "step-00000004"]


def test_a_checkpoint_without_a_loader_is_refused_to_one(tmp_path: Path) -> None:
    model, optimizer, loader = parts()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer)
        with pytest.raises(autopar.AutoparError, match="saved without a loader"):
            checkpoints.load_last(model, optimizer, loader=loader)


# --- on ranks


@captured_once()
def on_ranks(folder: str, recipe: str, positions: list[int]) -> tuple[int, list[float], int, float]:
    """Goes on from the last checkpoint for two steps and saves; returns what it found, and a number drawn."""
    model, batch, loss_fn = make("mlp")
    loader = Counted()
    made = autopar.compile(model, loss_fn=loss_fn, recipe=recipe, example_inputs=batch)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-6)
    with Checkpoints(folder) as checkpoints:
        last = checkpoints.load_last(made, optimizer, loader=loader)
        found, drawn = loader.count, random.random()
        losses = []
        for _ in range(2):
            losses.append(made.step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
        loader.count = positions[dist.get_rank()]
        random.seed(dist.get_rank())
        checkpoints.save(last.step + 2, made, optimizer, loader=loader)
    return last.step, losses, found, drawn


def in_one_process(steps: int) -> list[float]:
    model, batch, loss_fn = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for _ in range(steps):
        loss = run_with_loss(model, batch, {}, loss_fn)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.multiprocess
def test_half_of_the_ranks_go_on(four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path) -> None:
    runs = [four_ranks.run(on_ranks, str(tmp_path / "c"), "zero3", [7] * 4)]
    runs += [two_ranks.run(on_ranks, str(tmp_path / "c"), "ddp", [8, 9]) for _ in range(2)]
    assert [[step for step, *_ in run] for run in runs] == [[0] * 4, [2] * 2, [4] * 2]
    assert [count for _, _, count, _ in runs[1]] == [7, 7]
    assert [count for _, _, count, _ in runs[2]] == [8, 9]
    assert [drawn for *_, drawn in runs[2]] == [random.Random(rank).random() for rank in (0, 1)]
    losses = [equal_on_all([losses for _, losses, *_ in run]) for run in runs]
    assert losses[0] + losses[1] == pytest.approx(in_one_process(4), abs=1e-8)
    with pytest.raises(AssertionError, match=r"saved by 2 ranks whose loaders were at different"):
        four_ranks.run(on_ranks, str(tmp_path / "c"), "zero3", [7] * 4)


def with_a_full_disk(folder: str) -> tuple[str, int]:
    """Saves twice, the second time with a disk that is full for rank 1; what a rank is told, and the last step."""
    model = nn.Linear(3, 3)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, model)
    checkpoints.finish()
    before = os.fsync
    if dist.get_rank() == 1:
        os.fsync = full  # type: ignore[assignment]
    try:
        checkpoints.save(2, model)
        checkpoints.finish()
    except autopar.AutoparError as error:
        return str(error), checkpoints.load_last(model).step
    finally:
        os.fsync = before
    return "", 0


@pytest.mark.multiprocess
def test_all_ranks_know_of_a_save_that_failed_on_one(two_ranks: Ranks, tmp_path: Path) -> None:
    message, step = equal_on_all(two_ranks.run(with_a_full_disk, str(tmp_path)))
    assert "step-00000002 failed on rank " in message and step == 1
