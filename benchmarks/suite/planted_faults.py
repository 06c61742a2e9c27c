"""Which planted faults the tests find: the fast suite beside the whole suite of another version.

Each fault changes one line of a copy of this repository. The tests that reach the line run there, the quickest first,
until one fails. `benchmarks.suite.probes` tells which tests these are and how long they take:

    python -m benchmarks.suite.probes --into /tmp/probed --hits hits.txt > suite.log
    python -m benchmarks.suite.planted_faults --hits hits.txt --log suite.log --count 150 --results faults.jsonl

A fault that the fast suite misses is tried with the cases of `tests/slow.txt`, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.stored import store, stored
from benchmarks.suite.copies import ROOT, copied
from benchmarks.suite.faults import Fault, drawn
from benchmarks.suite.reach import SLOW_TESTS, Reach, seconds_of_cases, seconds_of_functions


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
        name: the fault.
        area: the fault's area.
        kind: the fault's kind.
        reaching: number of test functions that reach its line.
        found_by: the test that failed, or how the run ended; "" where all passed.
        is_fast: whether the fast suite found it.
        seconds: duration of the runs.
    """

    name: str
    area: str
    kind: str
    reaching: int
    found_by: str
    is_fast: bool
    seconds: float


@dataclass(frozen=True)
class Clone:
    """A copy of the repository in which faults are planted.

    Attributes:
        root: folder of the copy.
        limit_seconds: limit of a run of tests; a run that is over it has found nothing.
    """

    root: Path
    limit_seconds: float

    def failing(self, tests: Sequence[str], marks: str) -> str:
        """The first test that fails, or how the run ended without one; "" if all pass or there are none."""
        if not tests:
            return ""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "--timeout=90",
            "-m",
            marks,
            *tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=self.limit_seconds
            )
        except subprocess.TimeoutExpired:
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        if failed:
            return failed[1]
        # 5: every test was deselected.
        return "" if run.returncode in (0, 5) else f"exit code {run.returncode}: {run.stdout[-200:]}"


def verdict_of(fault: Fault, reach: Reach, seconds: dict[str, float], slow: Sequence[str], clone: Clone) -> Verdict:
    """Plants a fault, runs the tests that reach it, and takes the fault back."""
    path = clone.root / fault.path
    before, start = path.read_text(), time.monotonic()
    reached_by = reach.tests.get(fault.path, {}).get(fault.line, ())
    reaching = sorted(reached_by, key=lambda test: seconds.get(test, 0.0))
    fault.plant(clone.root)
    try:
        found = clone.failing(reaching, "not slow")
        is_fast = bool(found)
        if not found:
            cases = [case for case in slow if case.partition("[")[0] in reaching]
            found = clone.failing(cases, "slow or not slow")
    finally:
        path.write_text(before)
    return Verdict(
        fault.name, fault.area, fault.kind, len(reaching), found, is_fast, round(time.monotonic() - start, 1)
    )


@click.command()
@click.option("--hits", type=Path, required=True, help="File that probes wrote.")
@click.option("--log", type=Path, required=True, help="Log of the suite with --durations=0.")
@click.option("--first", default=0, help="Faults of the draw that are passed over.")
@click.option("--count", default=150, help="Number of faults of the draw.")
@click.option("--seed", default=0, help="Seed of the draw.")
@click.option("--jobs", default=2, help="Clones that run side by side.")
@click.option("--limit-seconds", default=240.0, help="Limit of one run of tests.")
@click.option("--results", type=Path, required=True, help="File that verdicts are added to.")
def main(
    hits: Path, log: Path, first: int, count: int, seed: int, jobs: int, limit_seconds: float, results: Path
) -> None:
    """Plants faults and tells which of them the tests find."""
    by_line = Reach.read(hits)
    seconds = seconds_of_functions(seconds_of_cases(log.read_text()))
    slow = SLOW_TESTS.read_text().splitlines()
    done = stored(results, Verdict)
    faults = [f for f in drawn(ROOT, count, seed)[first:] if f.name not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        clones = [Clone(copied(Path(folder) / str(i)), limit_seconds) for i in range(jobs)]

        def judge(job: int) -> None:
            for fault in faults[job::jobs]:
                store(results, verdict_of(fault, by_line, seconds, slow, clones[job]))

        list(pool.map(judge, range(jobs)))
    print("\n".join(summary(stored(results, Verdict).values())))


def summary(verdicts: Iterable[Verdict]) -> list[str]:
    """Lines that say how many faults of each area were found."""
    rows, found = [], list(verdicts)
    for area in [*dict.fromkeys(v.area for v in found), "all"]:
        of_area = [v for v in found if area in (v.area, "all")]
        whole, fast = sum(bool(v.found_by) for v in of_area), sum(v.is_fast for v in of_area)
        rows.append(f"{area}: {len(of_area)} planted, {whole} found by the whole suite, {fast} by the fast one")
    return rows


if __name__ == "__main__":
    main()
