"""Which tests reach which lines of the product, and how long each test takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.suite.copies import ROOT
from benchmarks.suite.probes import runs

SLOW_TESTS = ROOT / "tests" / "slow.txt"


@dataclass
class Reach:
    """Which tests reach which lines.

    Attributes:
        tests: functions of tests as `tests/x/test_y.py::test_z`, by path below the root and by line.
    """

    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, hits: Path, root: Path = ROOT) -> Reach:
        """Reads what probes wrote (`benchmarks.suite.probes`) in a copy of the product below `root`."""
        found: dict[str, dict[int, set[str]]] = {}
        for hit in hits.read_text().splitlines():
            path, line, test = hit.split(":", 2)
            found.setdefault(path, {}).setdefault(int(line), set()).add(test)
        return cls({path: _by_line(found[path], (root / path).read_text()) for path in found})


def _by_line(by_run: Mapping[int, set[str]], text: str) -> dict[int, set[str]]:
    return {line: by_run[run.start] for run in runs(text) if run.start in by_run for line in run}


def seconds_of_cases(log: str) -> dict[str, dict[str, float]]:
    """Seconds of every case of every test function, by a log of `pytest --durations=0`.

    >>> seconds_of_cases("0.50s call     tests/a.py::test_b[1]\\n0.25s setup    tests/a.py::test_b[1]")
    {'tests/a.py::test_b': {'tests/a.py::test_b[1]': 0.75}}
    """
    found: dict[str, dict[str, float]] = {}
    for seconds, case in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log, re.MULTILINE):
        of_function = found.setdefault(case.partition("[")[0], {})
        of_function[case] = of_function.get(case, 0.0) + float(seconds)
    return found


def seconds_of_functions(cases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds of all cases of every test function."""
    return {test: sum(of_test.values()) for test, of_test in cases.items()}
