"""Checkpoints of one process: round trips, what is refused, and saves that are cut short."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, load_optimizer_state, save_checkpoint
from autopar.runtime.formats.checkpoint_folder import read_saved
from tests.runtime.models import Normed, Tied, mean_square

X, Y = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DOCUMENT = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def make(width: int = 16, bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    first = nn.Linear(8, width, bias=bias)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, 8)).double()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `make()` after three steps."""
    model = make()
    optimizer = adamw(model)
    train(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, step=3)
    return tmp_path / "c"


def loads(path: Path) -> int:
    """The step of a checkpoint that loads."""
    model = make()
    return load_checkpoint(path, model, adamw(model))["step"]


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


@pytest.mark.parametrize("name", ["c.partial", "c.previous"])
def test_folders_of_others_beside_it_are_not_deleted(saved: Path, name: str) -> None:
    notes = saved.with_name(name) / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(autopar.AutoparError, match=rf"{name}/notes.txt would be deleted .*; give {name} another name"):
        save_checkpoint(saved, make(), step=4)
    assert notes.read_text() == "mine" and loads(saved) == 3


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


# --- what is refused


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"There is no checkpoint at .*/c\.$"):
        loads(tmp_path / "c")
    (tmp_path / "c.partial").mkdir()
    with pytest.raises(autopar.AutoparError, match="the first save to it did not finish"):
        loads(tmp_path / "c")


def shorten(folder: Path) -> None:
    (file,) = folder.glob("shard-*")
    file.write_bytes(file.read_bytes()[:-8])


def lose(folder: Path) -> None:
    (file,) = folder.glob("shard-*")
    file.unlink()


def garble(folder: Path) -> None:
    (file,) = folder.glob("shard-*")
    file.write_bytes(bytes(file.stat().st_size))


def empty(folder: Path) -> None:
    (folder / "state.pt").write_bytes(b"")


@pytest.mark.parametrize("accident", [shorten, lose, garble, empty])
def test_damage_is_named(saved: Path, accident: Callable[[Path], None]) -> None:
    accident(saved)
    with pytest.raises(autopar.AutoparError, match="c is damaged") as raised:
        loads(saved)
    if accident is shorten:
        assert "bytes, of" in str(raised.value)
    if accident is lose:
        assert "shard-00001.safetensors is missing" in str(raised.value)


def test_a_shard_of_another_save_is_refused(saved: Path, tmp_path: Path) -> None:
    """As a copy leaves it that was cut short: its sizes and checksums are right."""
    model = make()
    save_checkpoint(saved, model, step=3)
    with torch.no_grad():
        model[0].weight.add_(1)
    save_checkpoint(tmp_path / "other", model, step=4)
    (file,) = saved.glob("shard-*")
    own, other = file.read_bytes(), (tmp_path / "other" / file.name).read_bytes()
    assert len(own) == len(other)
    file.write_bytes(other)
    for check_bytes in (True, False):
        with pytest.raises(
            autopar.AutoparError, match=r"shard-00001.safetensors is changed, or is a file of another save"
        ):
            load_checkpoint(saved, make(), check_bytes=check_bytes)
    file.write_bytes(own)
    assert load_checkpoint(saved, make()) == {"step": 3}


def test_a_pipe_among_the_shards_is_not_waited_for(saved: Path) -> None:
    notes = torch.load(saved / "state.pt", weights_only=True)
    torch.save({key: value for key, value in notes.items() if key not in ("files", "headers")}, saved / "state.pt")
    os.mkfifo(saved / "shard-00002.safetensors")
    assert "shard-00002.safetensors is no regular file" in refusal(saved, adamw)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "state.pt"])
def test_a_flipped_bit_is_found_or_changes_nothing(saved: Path, name: str) -> None:
    """Every value is loaded as it was, or none is."""
    expected, file = make(), saved / name
    load_checkpoint(saved, expected, adamw(expected))
    bits, random = 8 * file.stat().st_size, torch.Generator().manual_seed(3)
    found = 0
    for bit in torch.randint(bits, (40,), generator=random).tolist():
        flip(file, bit)
        model = make()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        try:
            load_checkpoint(saved, model, adamw(model))
            before = expected.state_dict()
        except autopar.AutoparError as error:
            assert "c is damaged" in str(error)
            found += 1
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), bit
        flip(file, bit)
    assert found > 20, "most bits are bytes of tensors, or of zip records"


def test_a_changed_byte_in_a_file_of_torch_save_is_named(tmp_path: Path) -> None:
    """As in the optimizer.pt of a Trainer, of which torch.load compares no checksums."""
    file, state = tmp_path / "optimizer.pt", {"step": 3, "x": torch.arange(1000.0)}
    torch.save(state, file)
    assert read_saved(file)["x"].equal(state["x"])
    flip(file, 8 * file.read_bytes().index(state["x"].numpy().tobytes()))
    assert not torch.load(file, weights_only=True)["x"].equal(state["x"])
    with pytest.raises(autopar.AutoparError, match=r"optimizer\.pt cannot be read\. .*Copy it"):
        read_saved(file)


def packed(file: Path) -> None:
    """Writes a file of torch.save again with records that are packed, which torch reads, too."""
    with zipfile.ZipFile(file) as records:
        found = {name: records.read(name) for name in records.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as records:
        for name, content in found.items():
            records.writestr(name, content)


def test_a_small_file_that_would_fill_the_memory_is_refused(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    torch.save({"x": torch.zeros(10**6)}, file)
    packed(file)
    assert file.stat().st_size < 10**4
    with pytest.raises(
        autopar.AutoparError, match=r"optimizer\.pt cannot be read.*: it has packed records, which torch\."
    ):
        read_saved(file)
    packed(saved / "state.pt")
    assert "c is damaged. ValueError: it has packed records" in refusal(saved, adamw)
    notes = {"version": 1, "extra": {"x": Large()}}
    torch.save(notes, saved / "state.pt")
    assert "it has a bytearray, which could be of any size" in refusal(saved, adamw)
    with pytest.raises(
        autopar.AutoparError, match="it has a bytearray, which could be of any size; bytes can be saved"
    ):
        save_checkpoint(saved, make(), x=bytearray(3))
    save_checkpoint(saved, make(), x=bytes(3), word="builtins bytearray's")
    assert load_checkpoint(saved, make())["x"] == bytes(3)


class Large:
    """Four hundred bytes of a file, of which torch.load makes twenty billion."""

    def __reduce__(self) -> Any:
        return bytearray, (2 * 10**10,)


class Runs:
    """What runs code where a file is read by plain pickle."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_file_with_code_is_refused_without_torchs_advice_to_run_it(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    torch.save({"x": Runs()}, file)
    with pytest.raises(autopar.AutoparError, match=r"UnpicklingError: .*posix.*Copy it again") as raised:
        read_saved(file)
    torch.save({"version": 1, "x": Runs()}, saved / "state.pt")
    for said in (str(raised.value), refusal(saved, adamw)):
        assert "posix" in said and "weights_only" not in said and "\n" not in said


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"state": {}},
        {"state": {}, "param_groups": [{"lr": 1.0}]},
        {"state": {9: {}}, "param_groups": [{"params": [0, 1]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{"params": [0, 0]}]},
        {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["weight"]}]},
        {"state": {}, "param_groups": [], "statee": {}},
    ],
)
def test_what_is_no_state_of_an_optimizer_is_refused(state: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(autopar.AutoparError, match=r"not the state_dict\(\) of an optimizer"):
        load_optimizer_state(model, torch.optim.SGD(model.parameters()), state)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "options": (lambda notes: notes.update(groups=[(notes["groups"][0][0], "x")]), "its field 'groups' has values of"),
    "values": (lambda notes: notes["values"].update({"0.bias": 3}), "its field 'values' has values of other kinds"),
    "no values": (lambda notes: notes["values"].pop("0.bias"), "tensors of the optimizer but no values for 0.bias"),
    "sizes": (lambda notes: notes.update(files={"shard-00001.safetensors": "x"}), "its field 'files' has values of"),
    "extra": (lambda notes: notes.update(extra="x"), "its field 'extra' has values of other kinds"),
}


@pytest.mark.parametrize("forge", FORGED)
def test_a_state_that_no_save_writes_leaves_the_model_as_it_was(saved: Path, forge: str) -> None:
    change, says = FORGED[forge]
    notes = torch.load(saved / "state.pt", weights_only=True)
    change(notes)
    torch.save(notes, saved / "state.pt")
    assert says in refusal(saved, adamw)


def test_options_that_differ_within_a_group_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make()
    each = torch.optim.AdamW([{"params": [p], "lr": 1 / p.numel()} for p in model.parameters()])
    train(model, each)
    save_checkpoint(tmp_path / "c", model, each)
    assert "are in one group of the optimizer, but were saved with lr=" in refusal(tmp_path / "c", adamw)


def refusal(path: Path, optimizer_of: Callable[[nn.Module], Optimizer]) -> str:
    """The error of a load, which leaves the model as it was."""
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(autopar.AutoparError) as caught:
        load_checkpoint(path, model, optimizer_of(model))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    return str(caught.value)


def test_parts_are_checked_where_torch_sums_no_files(tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) is about files of torch.save: of these `state.pt` alone is one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "c", make())
    finally:
        torch.serialization.set_crc32_options(before)
    load_checkpoint(tmp_path / "c", make())
    file = tmp_path / "c" / "shard-00001.safetensors"
    flip(file, 8 * file.stat().st_size - 1)
    with pytest.raises(autopar.AutoparError, match="has other bytes than were saved"):
        load_checkpoint(tmp_path / "c", make())


def test_bytes_are_taken_as_they_are_where_that_is_asked(saved: Path) -> None:
    file = saved / "shard-00001.safetensors"
    flip(file, 8 * file.stat().st_size - 1)
    with pytest.raises(autopar.AutoparError, match="has other bytes than were saved"):
        load_checkpoint(saved, make())
    assert load_checkpoint(saved, make(), check_bytes=False)["step"] == 3


def test_a_checkpoint_without_checksums_loads(saved: Path) -> None:
    """Those of before have none."""
    notes = torch.load(saved / "state.pt", weights_only=True)
    del notes["checksums"]
    torch.save(notes, saved / "state.pt")
    flip(saved / "shard-00001.safetensors", 8 * ((saved / "shard-00001.safetensors").stat().st_size - 1))
    assert loads(saved) == 3


def test_a_field_that_no_checkpoint_has_is_refused(saved: Path) -> None:
    notes = torch.load(saved / "state.pt", weights_only=True)
    torch.save({**notes, "progres": None}, saved / "state.pt")
    with pytest.raises(autopar.AutoparError, match=r"'progres' \(did you mean progress\?\)"):
        loads(saved)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_a_checkpoint_reads_files_of_its_own_folder_alone(saved: Path, name: str) -> None:
    notes = torch.load(saved / "state.pt", weights_only=True)
    torch.save({**notes, "files": {name: 8}}, saved / "state.pt")
    with pytest.raises(autopar.AutoparError, match="not a file in it"):
        loads(saved)


def test_a_file_that_was_not_saved_with_it_is_no_part_of_a_checkpoint(saved: Path) -> None:
    (saved / "shard-00002.safetensors").write_bytes((saved / "shard-00001.safetensors").read_bytes())
    with pytest.raises(autopar.AutoparError, match=r"it contains shard-00002\.safetensors"):
        loads(saved)


def test_whole_numbers_are_no_weights(saved: Path, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(4, dtype=torch.int64))
    save_checkpoint(tmp_path / "whole", model)
    model.register_buffer("table", torch.zeros(4))
    with pytest.raises(autopar.AutoparError, match=r"another dtype, torch\.int64 in it"):
        load_checkpoint(tmp_path / "whole", model)


class Trap:
    """Runs code when it is unpickled."""

    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Trap, "sprung", True)


def test_no_code_of_a_checkpoint_is_run(saved: Path) -> None:
    torch.save({"version": 1, "extra": Trap()}, saved / "state.pt")
    (saved / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(autopar.AutoparError, match=r"is damaged\. UnpicklingError"):
        loads(saved)
    assert not Trap.sprung


@pytest.mark.parametrize("value", [lambda: 0, Trap(), make()], ids=["lambda", "class", "module"])
def test_values_that_would_need_code_are_not_saved(tmp_path: Path, value: object) -> None:
    with pytest.raises(autopar.AutoparError, match="extra value 'it' cannot be saved"):
        save_checkpoint(tmp_path / "c", make(), it=[value])
    assert not list(tmp_path.iterdir())


def test_another_model_is_named(saved: Path) -> None:
    with pytest.raises(autopar.AutoparError) as raised:
        load_checkpoint(saved, make(width=12))
    message = str(raised.value)
    assert "0.weight has shape [16, 8] in it and [12, 8] in the model" in message
    with pytest.raises(autopar.AutoparError, match=r"it has 0.bias, which the model lacks"):
        load_checkpoint(saved, make(bias=False))
    with pytest.raises(autopar.AutoparError, match=r"first.weight is not in it, .* and 6 more"):
        load_checkpoint(saved, Normed())


def test_an_older_version_is_named(saved: Path) -> None:
    torch.save({"version": 0}, saved / "state.pt")
    with pytest.raises(autopar.AutoparError, match="of version 0, but this autopar reads version 1"):
        loads(saved)


def test_optimizers_that_do_not_fit(saved: Path, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(autopar.AutoparError, match="is not a parameter of the model"):
        load_checkpoint(saved, model, adamw(make()))
    save_checkpoint(tmp_path / "d", model)
    with pytest.raises(autopar.AutoparError, match="was saved without an optimizer"):
        load_checkpoint(tmp_path / "d", model, adamw(model))


def test_a_checkpoint_without_weights_is_no_models(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    train(model, optimizer)
    with pytest.raises(autopar.AutoparError, match="only_optimizer=True but no optimizer"):
        save_checkpoint(tmp_path / "c", model, only_optimizer=True)
    save_checkpoint(tmp_path / "c", model, optimizer, only_optimizer=True)
    with pytest.raises(autopar.AutoparError, match="has no weights"):
        load_checkpoint(tmp_path / "c", model)
    other = make(width=12)
    with pytest.raises(autopar.AutoparError, match=r"0\.weight has shape \[16, 8\] in it and \[12, 8\] in the model"):
        load_checkpoint(tmp_path / "c", other, adamw(other))


def test_groups_that_were_apart_stay_apart(tmp_path: Path) -> None:
    model = make()
    groups = [{"params": [p], "lr": 10.0**-i} for i, p in enumerate(model.parameters())]
    save_checkpoint(tmp_path / "c", model, torch.optim.SGD(groups))
    with pytest.raises(autopar.AutoparError, match=r"saved with lr=1.0 and lr=0.1"):
        load_checkpoint(tmp_path / "c", model, adamw(model))


# --- docs/checkpoints.md


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for code in DOCUMENT.read_text().split("```python\n")[1:]:
        exec(code.split("```")[0], space)
    assert space["again"] == space["expected"]
    for name, value in space["trained"].state_dict().items():
        assert torch.equal(space["plain"].state_dict()[name], value), name
