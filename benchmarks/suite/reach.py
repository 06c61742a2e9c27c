"""Which tests reach which lines of the product, and how long each test takes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coverage.numbits import numbits_to_nums

SLOW_TESTS = Path(__file__).parents[2] / "tests" / "slow.txt"


@dataclass
class Reach:
    """Which tests reach which lines.

    Attributes:
        tests: functions of tests as `tests/x/test_y.py::test_z`, by path below the root and by line.
    """

    tests: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Path) -> Reach:
        """Reads a data file of coverage, whose paths may be of any clone."""
        found = cls()
        query = (
            "select file.path, context.context, line_bits.numbits from line_bits "
            "join file on file.id = file_id join context on context.id = context_id"
        )
        with sqlite3.connect(data) as base:
            for path, context, bits in base.execute(query):
                test = function_of(context)
                if test is not None:
                    lines = found.tests.setdefault(_below_root(path), {})
                    for line in numbits_to_nums(bits):
                        lines.setdefault(line, set()).add(test)
        return found


def _below_root(path: str) -> str:
    places = re.split(r"/(?=(?:autopar|passes|cost_model)/)", path)
    return "/".join(places[1:])


def function_of(context: str) -> str | None:
    """The test function of a context of coverage: a dotted name in pytest's process, a test's id in a rank.

    >>> function_of("tests.ir.test_mesh.test_size")
    'tests/ir/test_mesh.py::test_size'
    >>> function_of("tests/ir/test_mesh.py::test_size[2] (call)")
    'tests/ir/test_mesh.py::test_size'
    """
    # What a process was started for stands before what it was asked for later.
    context = context.split("|")[-1]
    if "::" in context:
        return context.split(" ")[0].split("[")[0]
    module, _, name = context.rpartition(".")
    return f"{module.replace('.', '/')}.py::{name}" if name.startswith("test_") else None


def seconds_of_cases(log: str) -> dict[str, dict[str, float]]:
    """Seconds of every case of every test function, by a log of `pytest --durations=0`.

    >>> seconds_of_cases("0.50s call     tests/a.py::test_b[1]\\n0.25s setup    tests/a.py::test_b[1]")
    {'tests/a.py::test_b': {'tests/a.py::test_b[1]': 0.75}}
    """
    found: dict[str, dict[str, float]] = {}
    for seconds, case in re.findall(
        r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log, re.MULTILINE
    ):
        of_function = found.setdefault(case.partition("[")[0], {})
        of_function[case] = of_function.get(case, 0.0) + float(seconds)
    return found


def seconds_of_functions(cases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds of all cases of every test function."""
    return {test: sum(of_test.values()) for test, of_test in cases.items()}
