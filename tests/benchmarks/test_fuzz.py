"""A slice of the fuzzer, and readers with planted faults, which it has to find."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_model.machines.gpu_names import canonical_gpu
from autopar.errors import AutoparError
from autopar.ir import Mesh
from autopar.ir.choice import owner_of
from autopar.ir.graph import Stack
from autopar.ir.layout import State
from autopar.ir.meeting import Meeting
from autopar.ir.order import Order
from autopar.models.targets import resolve_target
from autopar.search.request.recipes import check_recipe_axes
from autopar.search.request.single_rank_ops import is_lone_pin
from benchmarks.fuzz import watch as watching
from benchmarks.fuzz.calls import call, calls
from benchmarks.fuzz.damage import PLACES, small_disk
from benchmarks.fuzz.formats import Format, formats
from benchmarks.fuzz.page import replace_part
from benchmarks.fuzz.run import try_file
from benchmarks.fuzz.strangers import KINDS, meeting_seconds
from benchmarks.fuzz.watch import Watch


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_mutated_files_of_every_format_are_refused_or_read_as_they_are(watch: Watch, tmp_path: Path) -> None:
    for kind in formats(tmp_path / "samples"):
        name = f"suite/{kind.name}"
        seen, faults = try_file(kind, tmp_path / f"file{kind.ending}", name, watch)
        assert not faults, (name, seen.where)


def test_odd_arguments_are_refused_in_a_sentence(watch: Watch, tmp_path: Path) -> None:
    for arguments in calls(12, 0, tmp_path):
        seen = watch.call(lambda given=arguments: call(given))  # type: ignore[misc]
        assert not seen.faults((AutoparError,)) and seen.value is None, (arguments, seen)


def passes_over(path: Path) -> Any:
    """Reads half of a file."""
    content = path.read_bytes()
    return content[: len(content) // 2]


def runs(path: Path) -> Any:
    if path.read_bytes() != b"sample " * 9:
        os.system("true")
    return None


def raises(path: Path) -> Any:
    if path.read_bytes() != b"sample " * 9:
        raise KeyError("version")


def hangs(path: Path) -> Any:
    while path.read_bytes() != b"sample " * 9:
        pass


@pytest.mark.parametrize(
    ("read", "fault"),
    [(passes_over, "silent change"), (runs, "code run"), (raises, "raw traceback"), (hangs, "no answer")],
)
def test_a_planted_fault_is_found(
    read: Callable[[Path], Any], fault: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "LIMIT_SECONDS", 0.2)
    # Of a half that is passed over no change is found: to know of one, its values have to be compared.
    kind = Format("planted", b"sample " * 9, read, ".txt", values=str)
    found = [try_file(kind, tmp_path / "file.txt", str(seed), watch)[1] for seed in range(6)]
    assert any(fault in each for each in found)


def test_an_error_for_people_is_no_fault(watch: Watch) -> None:
    def refuse() -> None:
        raise AutoparError("it is damaged")

    assert watch.call(refuse).faults((AutoparError,)) == []


# A number of thousands of digits, which `int` refuses, one of other digits than ours, and a sign that is no number.
ODD_NUMBERS = ("9" * 5000, "\u0663", "\u00b2")
NUMBERED: dict[str, Callable[[str], Any]] = {
    "order": lambda n: Order.parse(2, f"{n}+1"),
    "pushed steps": lambda n: Order.parse(2, f"0+{n}"),
    "dim": lambda n: State.parse(f"S({n})"),
    "factor": lambda n: State.parse(f"S(0.{n})"),
    "owner": lambda n: State.parse(f"O({n})"),
    "meeting": lambda n: Meeting.parse("dp", 2, f"every {n} steps local"),
    "staleness": lambda n: Meeting.parse("dp", 2, f"every 1 step async-server owner=O(0) staleness={n}"),
    "mesh": lambda n: Mesh.parse(f"dp={n}"),
    "recipe": lambda n: check_recipe_axes(f"local:{n}", Mesh.parse("dp=2")),
    "target": lambda n: resolve_target(f"{n}.json"),
}


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=["long", "other digits", "no number"])
@pytest.mark.parametrize("read", NUMBERED.values(), ids=NUMBERED)
def test_a_number_that_is_not_of_few_digits_is_refused(read: Callable[[str], Any], number: str) -> None:
    with pytest.raises(AutoparError):
        read(number)


def test_names_of_layers_and_labels_have_numbers_of_few_digits() -> None:
    for number in ODD_NUMBERS:
        assert owner_of(f"@{number}") is None and Stack("layers", 2, 2).index(f"layers.{number}.weight") is None
        assert not is_lone_pin(f"@{number}")
    for number in ODD_NUMBERS[:2]:
        with pytest.raises(AutoparError, match="There is no GPU"):
            canonical_gpu(f"h100-{number}GB")


@pytest.mark.parametrize("target", [":", ".x:y", "..:"])
def test_a_target_without_a_module_is_refused(target: str) -> None:
    with pytest.raises(AutoparError, match="is not a name of a module"):
        call(["explain", target, "--mesh", "dp=2"])


# What is said, and what is there afterwards: the table of benchmarks/fuzz/results.md.
SAID = {
    "a cache in a folder that this user may not enter": "a plan is searched",
    "a cached file that others may write": "not read; replaced by one of 644",
    "a checkpoint on a full disk": "Saving .* failed on rank 0. OSError: .* No space left on device Then step 1 loads.",
    "a device": "Cannot write /dev/full: it is a device.",
    "a disk that is read-only": "Cannot write .*: Read-only file system. .* failed on rank 0. OSError.*Read-only",
    "a folder": "Cannot write .*: it is a folder.",
    "a folder that is not there": "Cannot write .*: there is no folder .*no.",
    "a folder that this user may not write": "Cannot write folder/.*: Permission denied. .* on rank 0. Permission",
    "a pipe": "Cannot write .*: it is a pipe.",
    "a plan on a full disk": "Cannot write .*: No space left on device. Then the old plan loads.",
    "a symbolic link": "written to the file to which it leads; the link stays",
    "a symbolic link to a device": "Cannot write .*link: it is a device.",
    "a umask of 027": "a new file has 640, one of 604 keeps 604",
    "a link to a file of this user in a cache": "searched; a file of ours is there, and the user's file is as it was",
    "a pipe in a cache": "a plan is searched; the pipe is there, and the user's file is as it was",
    "stdout on a full disk": "Error: The output cannot be written: No space left on device. Exit code 1.",
    "two jobs in one cache": "both have the same plan; the folder has .json",
}
OF_ROOT = ("a checkpoint on a full disk", "a disk that is read-only", "a plan on a full disk")


# Which start processes.
SLOW = ("stdout on a full disk", "two jobs in one cache")


@pytest.mark.parametrize("place", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in SAID])
def test_a_place_that_cannot_be_written_is_named(place: str, tmp_path: Path) -> None:
    assert SAID.keys() == PLACES.keys()
    if place in OF_ROOT:
        try:
            with small_disk(tmp_path):
                pass
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a small disk is mounted by root alone")
        (tmp_path / "disk").rmdir()
    assert re.search(SAID[place], PLACES[place](tmp_path))


def test_no_stranger_delays_two_replicas_by_a_second() -> None:
    for kind in KINDS:
        assert meeting_seconds(kind) < 2, kind


def test_a_part_of_the_page_is_replaced_alone(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    for title in ("one", "two", "one"):
        replace_part(page, title, [f"line of {title}"], "run")
    assert page.read_text().count("\n## one") == page.read_text().count("\n## two") == 1
