"""What the benchmarks of the suite say of tests: what they reach, which are redundant, which faults they find."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite.faults import AREAS, KINDS, drawn, faults_of
from benchmarks.suite.planted_faults import Clone, verdict_of
from benchmarks.suite.probes import plant
from benchmarks.suite.reach import SLOW_TESTS, Reach
from benchmarks.suite.slow_tests import redundant, slow_cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("x = a - b\n", "swapped operands", "x = (b - a)\n"),
        ("x = a - b\n", "other operator", "x = (a + b)\n"),
        ("x = f(a, b)\n", "swapped operands", "x = (f(b, a))\n"),
        ("x = a().sum(0)\n", "dropped reduction", "x = (a())\n"),
        ("x = max(a)\n", "dropped reduction", "x = (a)\n"),
        ("x = a[0]\n", "wrong dim", "x = (a[-1])\n"),
        ("x = 'é' * 2\n", "off by one", "x = 'é' * (3)\n"),
        ("x = a < b\n", "other comparison", "x = (a <= b)\n"),
        ("x = a and b\n", "negated", "x = (a or b)\n"),
        ("x = not a\n", "negated", "x = (a)\n"),
        ("work.wait()\n", "skipped wait", "(None)\n"),
    ],
)
def test_a_fault_changes_one_place(tmp_path: Path, before: str, kind: str, after: str) -> None:
    (tmp_path / "a.py").write_text(before)
    (fault,) = [f for f in faults_of(before, "passes", "a.py") if f.kind == kind]
    fault.plant(tmp_path)
    assert (tmp_path / "a.py").read_text() == after
    ast.parse(after)


def test_texts_in_braces_are_left_alone() -> None:
    assert not list(faults_of("x = f'{a - 1}'\n", "passes", "a.py"))


def test_a_draw_has_every_area_and_repeats(tmp_path: Path) -> None:
    for place in itertools.chain(*AREAS.values()):
        # Of a folder one file is enough here.
        source = (
            ROOT / place if place.endswith(".py") else max((ROOT / place).rglob("*.py"), key=lambda p: p.stat().st_size)
        )
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    found = drawn(tmp_path, 10, seed=1)
    assert found == drawn(tmp_path, 10, seed=1)
    assert [fault.area for fault in found[:5]] == ["rules", "conversions", "passes", "prices", "runtime"]
    assert {fault.kind for fault in found} <= set(KINDS)


def test_reach_is_read_by_runs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(x):\n    y = 1\n    if x:\n        y = 2\n    return y\n")
    (tmp_path / "hits").write_text("a.py:2:tests/t.py::test_u\na.py:2:tests/t.py::test_v\na.py:4:tests/t.py::test_v\n")
    both, one = {"tests/t.py::test_u", "tests/t.py::test_v"}, {"tests/t.py::test_v"}
    assert Reach.read(tmp_path / "hits", tmp_path).tests == {"a.py": {2: both, 3: both, 4: one}}


def test_a_probe_tells_each_test_that_comes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def f(x):\n    'Doc.'\n    if x:\n        return 1\n    elif x is None:\n        return 2\n"
    (tmp_path / "autopar").mkdir()
    (tmp_path / "autopar" / "__init__.py").touch()
    (tmp_path / "autopar" / "probed_here.py").write_text(text)
    plant(tmp_path)
    monkeypatch.setenv("AUTOPAR_HITS", str(tmp_path / "hits"))
    asking = (
        "import os; from autopar.probed_here import f; "
        "os.environ['PYTEST_CURRENT_TEST'] = 't.py::a[1] (call)'; f(1); f(1); assert f.__doc__"
    )
    subprocess.run(
        [sys.executable, "-c", asking], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True
    )
    assert (tmp_path / "hits").read_text().split() == [
        "autopar/probed_here.py:3:t.py::a",
        "autopar/probed_here.py:4:t.py::a",
    ]


def test_a_test_is_redundant_where_others_reach_its_lines() -> None:
    others = {f"quick{i}" for i in range(6)}
    reach = Reach({"a.py": {1: {"dear", "dearer", *others}, 2: {"alone", *others}, 3: {"alone"}}})
    seconds = {"dear": 9.0, "dearer": 99.0, "alone": 50.0}
    assert list(redundant(reach, seconds)) == ["dearer", "dear"]


def test_the_cheapest_case_stays() -> None:
    assert slow_cases({"a[1]": 3.0, "a[2]": 1.0, "a[3]": 2.0}) == ["a[3]", "a[1]"]
    assert slow_cases({"a": 4.9}) == []
    assert slow_cases({"a": 5.1}) == ["a"]


def test_a_planted_fault_is_found_and_taken_back(tmp_path: Path) -> None:
    text = "def difference(a, b):\n    return a - b\n"
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "test_a.py").write_text(
        "from a import difference\n\ndef test_zero():\n    assert difference(1, 1) == 0\n"
        "\ndef test_one():\n    assert difference(2, 1) == 1\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    (fault,) = [f for f in faults_of(text, "passes", "a.py") if f.kind == "swapped operands"]
    tests = {"test_a.py::test_zero", "test_a.py::test_one"}
    clone, reach = Clone(tmp_path, limit_seconds=60.0), Reach({"a.py": {2: tests}})
    found = verdict_of(fault, reach, {}, [], clone)
    assert (found.found_by, found.is_fast, found.reaching) == ("test_a.py::test_one", True, 2)
    blind = verdict_of(fault, Reach({"a.py": {2: {"test_a.py::test_zero"}}}), {}, [], clone)
    assert (blind.found_by, blind.is_fast) == ("", False)
    assert (tmp_path / "a.py").read_text() == text


def test_the_slow_tests_are_there() -> None:
    for case in SLOW_TESTS.read_text().splitlines():
        path, _, name = case.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), case
