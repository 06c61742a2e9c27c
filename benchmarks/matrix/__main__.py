"""Runs a slice of the tests in one environment for each torch that autopar supports.

    python -m benchmarks.matrix [ROW ...]     all rows, or those named

Every row has an environment in .venv-matrix (another folder: --environments), which is made where there is none. The
results are written to benchmarks/matrix/results.json, and as a table into benchmarks/results/matrix.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from autopar.versions import OLDEST_TORCH
from benchmarks.stored import write_whole
from benchmarks.tables import between_marks, markdown_table

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = Path(__file__).parent / "results.json", ROOT / "benchmarks" / "results" / "matrix.md"
BEGIN, END = "<!-- matrix: written by make matrix -->", "<!-- end of matrix -->"

# Row -> what pip is asked for, torch first and alone: what comes after finds it there.
ROWS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "oldest": ([f"torch=={'.'.join(map(str, OLDEST_TORCH))}.*"], ["-e", ".[dev,zoo]"]),
    "pinned": (["-c", "constraints.txt", "torch"], ["-c", "constraints.txt", "-e", ".[dev,zoo]"]),
    "newest": (["--upgrade", "torch"], ["--upgrade", "-e", ".[dev,zoo]"]),
}

# The slice: what is checked, and the tests that check it. All of it takes less than ten minutes on two idle cores.
SLICE: Mapping[str, Sequence[str]] = {
    "private torch": ["tests/_torch"],
    "every schedule, two ranks": ["tests/runtime/pipeline/test_pipeline.py::test_every_schedule"],
    "every recipe, two ranks": ["tests/runtime/plans/test_recipes.py::test_one_axis"],
    "commands with --json": ["tests/cli/test_stdout.py"],
    "checkpoints": [f"tests/runtime/checkpoint/test_{name}.py" for name in ("checkpoint", "damage", "misfits")],
    "backend": ["tests/runtime/execute/test_backend.py::test_on_two_ranks"],
}


@dataclass(frozen=True)
class Result:
    """A row's result of one part of the slice.

    Attributes:
        row: name of the row.
        part: name of the part.
        versions: versions of Python, torch, numpy and highspy.
        passed, failed, skipped: numbers of tests.
        seconds: duration, environments not included.
        day: when it was run.
    """

    row: str
    part: str
    versions: Mapping[str, str]
    passed: int
    failed: int
    skipped: int
    seconds: float
    day: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=", ".join(ROWS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-matrix")
    given = parser.parse_args()
    for row in given.rows:
        python = environment(row, given.environments)
        found = [run(row, part, python) for part in SLICE]
        others = [each for each in known() if each.row != row]
        write_whole([asdict(each) for each in (*others, *found)], RESULTS)
        write_page()
    sys.exit(any(each.failed for each in known() if each.row in given.rows))


def environment(row: str, folder: Path) -> Path:
    """The Python of a row's environment, with the row's packages."""
    python = folder / row / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / row], check=True)
    for packages in ROWS[row]:
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, cwd=ROOT)
    return python


def run(row: str, part: str, python: Path) -> Result:
    """Runs one part of the slice in an environment."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    start = time.monotonic()
    subprocess.run([python, *command, *SLICE[part]], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (suite,) = ElementTree.parse(report).getroot()
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return Result(
        row,
        part,
        versions(python),
        count["tests"] - failed - count["skipped"],
        failed,
        count["skipped"],
        round(time.monotonic() - start, 1),
        date.today().isoformat(),
    )


def versions(python: Path) -> Mapping[str, str]:
    """The versions of Python and of the packages on which most depends."""
    code = (
        "import json, platform; from importlib.metadata import version;"
        "names = 'torch', 'numpy', 'highspy', 'sympy', 'networkx';"
        "print(json.dumps({'Python': platform.python_version(), **{n: version(n) for n in names}}))"
    )
    result: Mapping[str, str] = json.loads(subprocess.check_output([python, "-c", code]))
    return result


def known() -> list[Result]:
    """The stored results, in the order of the rows."""
    if not RESULTS.exists():
        return []
    found = [Result(**each) for each in json.loads(RESULTS.read_text())]
    return sorted(found, key=lambda each: [*ROWS].index(each.row))


def write_page() -> None:
    """Writes the table of the results into the page, between its two marks."""
    PAGE.write_text(between_marks(PAGE.read_text(), BEGIN, END, table(known())))


def table(results: Iterable[Result]) -> list[str]:
    """The lines of the table: a line for every row and part of the slice."""
    heads = ("row", "with", "tests of", "passed", "failed", "skipped", "seconds", "on")
    rows = [
        (
            each.row,
            ", ".join(f"{name} {number}" for name, number in each.versions.items()),
            each.part,
            str(each.passed),
            str(each.failed),
            str(each.skipped),
            f"{each.seconds:.0f}",
            each.day,
        )
        for each in results
    ]
    return markdown_table(heads, rows, text_columns=3)


if __name__ == "__main__":
    main()
