"""Gives every wrong input at both doors, on two Gloo ranks, and writes what the first screen says.

OMP_NUM_THREADS=1 python benchmarks/wrong_inputs/run.py --markdown benchmarks/results/wrong_inputs.md
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.stored import store, stored
from benchmarks.wrong_inputs.cases import CASES, Case, Door
from tests.support.launched import COLUMNS, ROWS, Screen, launch

RANKS, LIMIT_SECONDS = 2, 240.0


@dataclass(frozen=True)
class Row:
    """A wrong input as it was met at one door.

    Attributes:
        case: the wrong input.
        door: where it was given.
        screen: what the user saw.
    """

    case: Case
    door: Door
    screen: Screen

    @property
    def missing(self) -> list[str]:
        """What the first screen lacks."""
        found = []
        for what, pattern in (("cause", self.case.cause), ("remedy", self.case.remedy)):
            if not re.search(pattern, self.screen.first):
                found.append(what)
        if self.screen.exit_code is None:
            found.append("an end")
        elif (self.screen.exit_code != 0) != self.case.fails:
            found.append(f"the right exit code, not {self.screen.exit_code}")
        return found


@dataclass(frozen=True)
class Result:
    """A row as a file of results holds it; see `Screen` for what it does not state.

    Attributes:
        name: the wrong input and the door.
    """

    name: str
    text: str
    exit_code: int | None
    seconds: float


def met(case: Case, door: Door) -> Row:
    """The wrong input, given at a door."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(case.script(door))
        screen = launch(script, ranks=RANKS, timeout_seconds=LIMIT_SECONDS, interrupt_at=case.interrupt_at)
        return Row(case, door, Screen(_plain(screen.text, folder), screen.exit_code, screen.seconds))


def _plain(text: str, folder: str) -> str:
    """The output with paths that are the same on every machine."""
    text = text.replace(f"{folder}/", "")
    return text.replace(f"{Path(torch.__file__).parents[1]}/", "").replace(f"{Path(__file__).parents[2]}/", "")


def page(rows: list[Row]) -> str:
    """The rows as a page of Markdown: a table, and below it the texts."""
    lines = [
        "# Wrong inputs",
        "",
        "What a user sees of a wrong input: one small training script with one wrong line, on two Gloo ranks "
        f"under `torchrun`, at both doors. The first screen ({ROWS} lines of {COLUMNS} columns) has to hold cause "
        "and remedy. Seconds include the start of Python on a machine of two cores that is busy with "
        "other work. Written by",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/wrong_inputs/run.py --markdown benchmarks/results/wrong_inputs.md",
        "",
        "| input | door | cause and remedy on the first screen | exit code | s | lines in all |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        missing = ", ".join(row.missing)
        shown = row.screen
        lines.append(
            f"| {row.case.name} | {row.door} | {'no: lacks ' + missing if missing else 'yes'} | "
            f"{shown.exit_code} | {shown.seconds:.1f} | {len(shown.text.splitlines())} |"
        )
    lines += ["", "What `torchrun` logs itself, with times and process numbers, is left out of the texts below."]
    for row in rows:
        lines += ["", f"## {row.case.name}, {row.door}", ""]
        lines += [f"    {line}".rstrip() for line in _said(row.screen)]
    return "\n".join(lines) + "\n"


def _said(screen: Screen) -> list[str]:
    """The lines of the first screen that the ranks wrote."""
    ranks = screen.first.partition("\nTraceback (most recent call last):")[0]
    return [
        re.sub(r"logs/none_\w+/", "logs/.../", line) for line in ranks.splitlines() if not re.match(r"[WE]\d{4} ", line)
    ]


def _row(case: Case, door: Door, results: Path | None) -> Row:
    """The row of the file of results, or that of a run, which is added to the file."""
    name = f"{case.name}, {door}"
    known = {} if results is None else stored(results, Result)
    if name in known:
        found = known[name]
        return Row(case, door, Screen(found.text, found.exit_code, found.seconds))
    row = met(case, door)
    if results is not None:
        shown = row.screen
        store(results, Result(name, shown.text, shown.exit_code, shown.seconds))
    return row


@click.command()
@click.option("--only", default="", help="Part of the names of the inputs to give.")
@click.option("--door", "doors", multiple=True, help="The doors; by default both.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Where to write the page.")
@click.option("--results", type=click.Path(path_type=Path), help="Where to keep what was met.")
@click.option("--verbose", is_flag=True, help="Print every screen.")
def main(only: str, doors: tuple[str, ...], markdown: Path | None, results: Path | None, verbose: bool) -> None:
    """Gives all inputs, or some, and says which first screens lack something."""
    rows = []
    wanted = [(case, door) for case in CASES for door in case.doors if only in case.name]
    for case, door in wanted:
        if doors and door not in doors:
            continue
        row = _row(case, door, results)
        rows.append(row)
        verdict = f"lacks {', '.join(row.missing)}" if row.missing else "ok"
        click.echo(f"{case.name}, {door}: {verdict}; {row.screen.seconds:.1f} s")
        if verbose:
            click.echo(row.screen.text)
    if markdown is not None:
        markdown.write_text(page(rows))
    sys.exit(any(row.missing for row in rows))


if __name__ == "__main__":
    main()
