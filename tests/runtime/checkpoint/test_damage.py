"""Damaged and forged checkpoints: each is named, nothing of it is loaded, and no code in it is run."""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from autopar.runtime.formats.checkpoint_folder import read_saved
from tests.runtime.checkpoint.saves import adamw, loads, make, refusal

# --- files that are damaged


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


# --- files that nobody saved so


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


class Wide:
    """A few bytes of a file, of which torch.load makes a tensor of four million."""

    def __reduce__(self) -> Any:
        return torch.Tensor, (10**6,)


def nested(levels: int) -> list[Any]:
    return functools.reduce(lambda inside, _: [inside], range(levels), [])


def test_a_value_is_saved_as_deep_as_it_is_loaded(saved: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"'x' cannot be saved .* it is nested more than 100 levels deep"):
        save_checkpoint(saved, make(), x=nested(101))
    save_checkpoint(saved, make(), x=nested(90))
    assert load_checkpoint(saved, make())["x"] == nested(90)


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "options": (lambda notes: notes.update(groups=[(notes["groups"][0][0], "x")]), "its field 'groups' has values of"),
    "values": (lambda notes: notes["values"].update({"0.bias": 3}), "its field 'values' has values of other kinds"),
    "no values": (lambda notes: notes["values"].pop("0.bias"), "tensors of the optimizer but no values for 0.bias"),
    "sizes": (lambda notes: notes.update(files={"shard-00001.safetensors": "x"}), "its field 'files' has values of"),
    "extra": (lambda notes: notes.update(extra="x"), "its field 'extra' has values of other kinds"),
    "depth": (lambda notes: notes["extra"].update(x=nested(101)), "it is nested more than 100 levels deep"),
    "width": (lambda notes: notes["extra"].update(x=Wide()), "it has a tensor with more bytes than the file"),
}


@pytest.mark.parametrize("forge", FORGED)
def test_a_state_that_no_save_writes_leaves_the_model_as_it_was(saved: Path, forge: str) -> None:
    change, says = FORGED[forge]
    notes = torch.load(saved / "state.pt", weights_only=True)
    change(notes)
    torch.save(notes, saved / "state.pt")
    assert says in refusal(saved, adamw)


def test_a_field_that_no_checkpoint_has_is_refused(saved: Path) -> None:
    notes = torch.load(saved / "state.pt", weights_only=True)
    torch.save({**notes, "progres": None}, saved / "state.pt")
    with pytest.raises(autopar.AutoparError, match=r"'progres' \(did you mean progress\?\)"):
        loads(saved)


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
