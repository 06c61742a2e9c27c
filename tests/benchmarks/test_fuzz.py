"""A slice of the fuzzer, and readers with planted faults, which it has to find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError
from benchmarks.fuzz import watch as watching
from benchmarks.fuzz.calls import call, calls
from benchmarks.fuzz.formats import Format, formats
from benchmarks.fuzz.page import replace_part
from benchmarks.fuzz.run import Count, try_file
from benchmarks.fuzz.strangers import KINDS, meeting_seconds
from benchmarks.fuzz.watch import Watch


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_mutated_files_of_every_format_are_refused_or_read_as_they_are(
    watch: Watch, tmp_path: Path
) -> None:
    for kind in formats(tmp_path / "samples"):
        count = Count(kind.name)
        for seed in range(2):
            name = f"suite/{kind.name}/{seed}"
            count.add(name, *try_file(kind, tmp_path / f"file{kind.ending}", name, watch))
        assert not count.faults, count.examples


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
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("read", "fault"),
    [(passes_over, "silent change"), (runs, "code run"), (raises, "raw traceback"), (hangs, "no answer")],
)  # fmt: skip
def test_a_planted_fault_is_found(
    read: Callable[[Path], Any], fault: str, watch: Watch, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(watching, "LIMIT_SECONDS", 0.2)
    # Of a half that is passed over no change is found: to know of one, its values have to be compared.
    kind = Format("planted", b"sample " * 9, read, ".txt", values=str)
    found = [try_file(kind, tmp_path / "file.txt", str(seed), watch)[1] for seed in range(6)]
    assert any(fault in each for each in found)


def test_an_error_for_people_is_no_fault(watch: Watch) -> None:
    def refuse() -> None:
        raise AutoparError("it is damaged")

    assert watch.call(refuse).faults((AutoparError,)) == []


@pytest.mark.parametrize("target", [":", ".x:y", "..:"])
def test_a_target_without_a_module_is_refused(target: str) -> None:
    with pytest.raises(AutoparError, match="is no name of a module"):
        call(["explain", target, "--mesh", "dp=2"])


def test_no_stranger_delays_two_replicas_by_a_second() -> None:
    for kind in KINDS:
        assert meeting_seconds(kind) < 2, kind


def test_a_part_of_the_page_is_replaced_alone(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    for title in ("one", "two", "one"):
        replace_part(page, title, [f"line of {title}"], "run")
    assert page.read_text().count("\n## one") == page.read_text().count("\n## two") == 1
