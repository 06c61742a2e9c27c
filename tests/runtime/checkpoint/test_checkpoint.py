"""Checkpoints of one process: what goes on after a round trip, and folders that saves leave whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from tests.runtime.checkpoint.saves import X, Y, adamw, loads, make, train
from tests.runtime.models import Normed, Tied, mean_square

DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoints.md"


# --- round trips


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),  # which has no state
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
        lambda m: torch.optim.Adagrad(m.parameters()),
        lambda m: torch.optim.Adafactor(m.parameters()),  # whose state has other shapes
        lambda m: torch.optim.AdamW(m.named_parameters(), lr=torch.tensor(1e-2)),
        lambda m: torch.optim.AdamW([{"params": [p], "lr": 1 / p.numel()} for p in m.parameters()]),
    ],
    ids=["AdamW", "SGD", "momentum", "Adagrad", "Adafactor", "lr tensor", "groups"],
)
def test_training_goes_on(tmp_path: Path, optimizer: Callable[[nn.Module], Optimizer]) -> None:
    model = make()
    first = optimizer(model)
    train(model, first)
    save_checkpoint(tmp_path / "c", model, first)
    expected = train(model, first)
    model = make()
    second = optimizer(model)
    assert load_checkpoint(tmp_path / "c", model, second) == {}
    assert train(model, second) == expected


def test_an_optimizer_that_was_not_stepped(tmp_path: Path) -> None:
    model = make()
    save_checkpoint(tmp_path / "c", model, adamw(model))
    expected = train(model, adamw(model))
    optimizer = adamw(model)
    train(model, optimizer)  # it has a state, and the checkpoint has none
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert not optimizer.state
    assert train(model, optimizer) == expected


def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    model = make()
    model.get_parameter("0.weight").requires_grad_(False)
    optimizer = adamw(model)
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer)
    load_checkpoint(tmp_path / "c", model, optimizer)
    states = [bool(optimizer.state.get(p)) for p in model.parameters()]
    assert states == [False, True, True, True]


def test_parameters_of_one_number(tmp_path: Path) -> None:
    """Where Adam's `step` has the shape of its moments."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    optimizer = adamw(model)
    model.scale.square().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer)
    expected = {k: v.clone() for k, v in optimizer.state[model.scale].items()}
    optimizer = adamw(model)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert optimizer.state[model.scale] == expected


def test_buffers_and_extra_values(tmp_path: Path) -> None:
    model, other = Normed(), Normed()
    model.register_buffer("mask", torch.tensor([True, False]))
    other.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
    model(torch.randn(4, 8))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    extra = {"scheduler": scheduler.state_dict(), "betas": (0.9, 0.95), "x": torch.arange(2)}
    save_checkpoint(tmp_path / "c", model, **extra)
    found = load_checkpoint(tmp_path / "c", other)
    assert found["scheduler"] == extra["scheduler"] and found["betas"] == extra["betas"]
    assert found["x"].tolist() == [0, 1]
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


class Counting(nn.Linear):
    """A module that keeps something besides tensors."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_the_extra_state_of_modules(tmp_path: Path) -> None:
    model, other = Counting(2, 2), Counting(2, 2)
    model.calls = 7
    save_checkpoint(tmp_path / "c", model)
    load_checkpoint(tmp_path / "c", other)
    assert other.calls == 7


def test_tied_parameters_under_every_name(tmp_path: Path) -> None:
    """Saved where they are one, loaded where they are two (as on two stages), and back."""
    tied, two = Tied(), Tied()
    two.head.weight = nn.Parameter(torch.zeros(16, 8))
    first, second, third = adamw(tied), adamw(two), adamw(tied)
    tied(torch.arange(4)).sum().backward()
    first.step()
    save_checkpoint(tmp_path / "c", tied, first)
    load_checkpoint(tmp_path / "c", two, second)
    moments = second.state[two.head.weight]["exp_avg"]
    assert torch.equal(moments, first.state[tied.head.weight]["exp_avg"])
    save_checkpoint(tmp_path / "c", two, second)
    load_checkpoint(tmp_path / "c", tied, third)
    assert torch.equal(moments, third.state[tied.head.weight]["exp_avg"])


def test_a_compiled_module_draws_on(tmp_path: Path) -> None:
    """Dropout goes on with the masks it would have had."""

    def compiled() -> autopar.CompiledModule:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
        return autopar.compile(model, loss_fn=mean_square, example_inputs=(X, Y))

    model = compiled()
    model.step(X, Y)
    save_checkpoint(tmp_path / "c", model)
    expected = [model.step(X, Y).item() for _ in range(3)]
    model = compiled()
    load_checkpoint(tmp_path / "c", model)
    assert model._runs.steps == 1
    assert [model.step(X, Y).item() for _ in range(3)] == expected


def test_a_compiled_module_needs_its_plan(saved: Path) -> None:
    model = autopar.compile(make(), loss_fn=mean_square)
    for call in (load_checkpoint, save_checkpoint):
        with pytest.raises(autopar.PlanError, match="There is no plan yet"):
            call(saved, model)


def test_a_module_without_a_plan_is_refused_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    model = autopar.compile(make(), loss_fn=mean_square)
    with pytest.raises(autopar.PlanError, match="There is no plan yet"):
        autopar.checkpoint.Checkpoints(tmp_path).load_last(model)


def test_a_sparse_buffer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(autopar.AutoparError, match=r"edges of the model cannot be saved.*persistent=False"):
        save_checkpoint(tmp_path / "c", model)


# --- the folder


def test_a_save_replaces_the_one_before(saved: Path) -> None:
    save_checkpoint(saved, make(), step=4)
    assert load_checkpoint(saved, make()) == {"step": 4}
    assert [each.name for each in saved.parent.iterdir()] == ["c"]


def test_a_link_stays_a_link(saved: Path) -> None:
    link = saved.with_name("latest")
    link.symlink_to(saved)
    save_checkpoint(link, make(), step=4)
    assert link.is_symlink() and load_checkpoint(saved, make()) == {"step": 4}


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(autopar.AutoparError, match=r"has files and is not a checkpoint.*give a folder"):
        save_checkpoint(tmp_path, make())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_files_of_others_in_a_checkpoint_are_not_deleted(saved: Path) -> None:
    notes = saved / "tokenizer.json"
    notes.write_text("mine")
    with pytest.raises(
        autopar.AutoparError, match=r"c/tokenizer.json would be deleted by a save .*; move it elsewhere"
    ):
        save_checkpoint(saved, make(), step=4)
    assert notes.read_text() == "mine" and loads(saved) == 3
    notes.rename(saved.parent / "tokenizer.json")
    save_checkpoint(saved, make(), step=4)


def test_a_model_without_tensors_is_saved_twice(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / "c", nn.ReLU(), step=step)
    assert load_checkpoint(tmp_path / "c", nn.ReLU()) == {"step": 2}


@pytest.mark.parametrize("name", ["c.partial", "c.previous"])
def test_folders_of_others_beside_it_are_not_deleted(saved: Path, name: str) -> None:
    notes = saved.with_name(name) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(autopar.AutoparError, match=rf"{name}/notes.txt would be deleted .*; give {name} another name"):
        save_checkpoint(saved, make(), step=4)
    assert notes.read_text() == "mine" and loads(saved) == 3


@pytest.mark.parametrize("name", ["c.previous", "c"])
def test_a_checkpoint_of_the_users_beside_it_is_not_deleted(saved: Path, name: str) -> None:
    """Whether it was put there as a copy, or is all that is left."""
    own = saved.rename(saved.with_name("c.previous"))
    if name != "c":
        shutil.copytree(own, saved)
    with pytest.raises(autopar.AutoparError, match=r"c\.previous is a checkpoint of its own, .*; give it another name"):
        save_checkpoint(saved, make(), step=4)
    assert loads(own) == 3
    own.rename(saved.with_name("kept"))
    save_checkpoint(saved, make(), step=4)


def test_a_state_of_another_program_is_not_deleted(tmp_path: Path) -> None:
    """Other programs call a file `state.pt`, too; what has no shard is no checkpoint."""
    file = tmp_path / "run" / "state.pt"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(autopar.AutoparError, match="run has files and is not a checkpoint, but would be replaced"):
        save_checkpoint(file.parent, make(), step=4)
    assert file.read_text() == "mine"


def test_between_the_two_renames(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ends there leaves the checkpoint before it, and the next save goes through."""
    rename = Path.rename

    def end(self: Path, target: Path) -> None:
        if self.name == "c.partial":
            raise KeyboardInterrupt
        rename(self, target)

    monkeypatch.setattr(Path, "rename", end)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, make(), step=4)
    monkeypatch.undo()
    assert not saved.exists() and loads(saved) == 3
    save_checkpoint(saved, make(), step=5)
    assert load_checkpoint(saved, make()) == {"step": 5}
    assert [each.name for each in saved.parent.iterdir()] == ["c"]


def test_a_save_that_cannot_write_leaves_the_one_before(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(autopar.AutoparError, match=r"failed on rank 0.*No space left"):
        save_checkpoint(saved, make(), step=4)
    monkeypatch.undo()
    assert loads(saved) == 3


# --- docs/checkpoints.md


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for code in DOCUMENT.read_text().split("```python\n")[1:]:
        exec(code.split("```")[0], space)
    assert space["again"] == space["expected"]
    for name, value in space["trained"].state_dict().items():
        assert torch.equal(space["plain"].state_dict()[name], value), name
