"""Which tests reach which lines, asked by probes: calls that are written into a copy of the product.

A run is a row of simple statements of a function, up to the next statement that has a body. Who reaches its first
statement reaches all of them, or raises. Before it stands a call that writes the test of the moment into a file, once a
process: pytest names the test in the environment, and `tests/runtime/gloo_ranks.py` hands the name on to its ranks.

    python -m benchmarks.suite.probes --into /tmp/probed --hits hits.txt > suite.log

runs the whole suite so; its log has the seconds of every test. Tests that look at the text of the product fail there.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.suite.copies import copied

PRODUCT = ("autopar", "passes", "cost_model")
_PROBE = '''"""Written by benchmarks/suite/probes.py."""
import os
SEEN = set()
def hit(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].split("[")[0]
    if test and (place, test) not in SEEN:
        SEEN.add((place, test))
        with open(os.environ["AUTOPAR_HITS"], "a") as file:
            file.write(f"{place}:{test}\\n")
'''


def runs(text: str) -> Iterator[range]:
    """The lines of every run of a module's functions.

    >>> list(runs("def f(x):\\n    y = 1\\n    if x:\\n        y = 2\\n    return y"))
    [range(3, 5), range(5, 6), range(6, 7)]
    """
    tree = ast.parse(text)
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    lines = text.splitlines()
    for body in {id(b): b for f in functions for b in _bodies(f)}.values():
        yield from _runs_of(body, lines)


def _bodies(function: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body:
                yield body


def _runs_of(body: list[ast.stmt], lines: list[str]) -> Iterator[range]:
    start = None
    for statement in body:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        if not _can_follow_a_probe(statement, lines[first - 1]):
            continue
        start = start or first
        inner = [b[0].lineno for b in _bodies(statement) if b]
        if inner:
            yield range(start, min(inner))
            start = None
    if start is not None:
        yield range(start, (body[-1].end_lineno or start) + 1)


def _can_follow_a_probe(statement: ast.stmt, line: str) -> bool:
    """Whether a line may stand before a statement: not before a docstring, an `elif`, or what shares a line."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    return not line[: statement.col_offset].strip() and not line.lstrip().startswith("elif ")


def probed(text: str, path: str) -> str:
    """A module's text with a probe at every run."""
    lines = text.splitlines(keepends=True)
    for run in sorted(runs(text), key=lambda run: -run.start):
        line = lines[run.start - 1]
        indent = line[: len(line) - len(line.lstrip())]
        probe = f'{indent}__import__("autopar.planted_probe").planted_probe.hit("{path}:{run.start}")\n'
        lines.insert(run.start - 1, probe)
    return "".join(lines)


def plant(root: Path) -> None:
    """Writes a probe into every run of the product below `root`."""
    for path in [p for folder in PRODUCT for p in sorted((root / folder).rglob("*.py"))]:
        if not any(parent.is_symlink() for parent in path.parents):
            path.write_text(probed(path.read_text(), str(path.relative_to(root))))
    (root / "autopar" / "planted_probe.py").write_text(_PROBE)


@click.command()
@click.option("--into", type=Path, required=True, help="Folder of the copy, which is not there.")
@click.option("--hits", type=Path, required=True, help="File that tests and lines are added to.")
@click.argument("arguments", nargs=-1)
def main(into: Path, hits: Path, arguments: tuple[str, ...]) -> None:
    """Plants probes in a copy, and runs the whole suite there; more arguments go to pytest."""
    plant(copied(into))
    environment = {"PYTHONPATH": str(into), "OMP_NUM_THREADS": "1", "AUTOPAR_HITS": str(hits.resolve())}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "--durations=0",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        *arguments,
    ]
    sys.exit(subprocess.run(command, cwd=into, env=os.environ | environment).returncode)


if __name__ == "__main__":
    main()
