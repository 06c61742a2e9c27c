"""Gives every odd script to every door, on two Gloo ranks, and writes whether it trains as it does plainly.

OMP_NUM_THREADS=1 python benchmarks/parity/odd_scripts.py --markdown benchmarks/results/odd_scripts.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import RankFailed, Ranks
from tests.support.odd.odd_scripts import SCRIPTS, Verdict, verdict
from tests.support.scripts import DOORS

RANKS = 2
SAFE = ("equal", "refused")
_WIDTH = 110  # letters of a refusal in the table


def met(ranks: Ranks, run: Callable[[str, str], Verdict], name: str, door: str) -> Verdict:
    """The end of a script at a door, on the first rank whose end is not a safe one, else on rank 0."""
    try:
        found: list[Verdict] = ranks.run(run, name, door)
    except RankFailed as error:
        return Verdict(f"{name}, {door}", "breaks", str(error))
    unsafe = next((each for each in found if each.word not in SAFE), None)
    if unsafe is not None:  # some ranks may have gone on alone, and wait for others
        ranks.stop()
    return unsafe or found[0]


def all_met(
    run: Callable[[str, str], Verdict], names: Collection[str], doors: Collection[str], results: Path | None
) -> dict[str, Verdict]:
    """The ends of scripts at all doors; those that the file of results has are not run again.

    Args:
        run: function of a script's name and a door, which every rank calls.
        names: the scripts.
        doors: the doors.
        results: file of verdicts, one a line; None keeps none.
    """
    verdicts = {} if results is None else stored(results, Verdict)
    ranks = Ranks(RANKS)
    try:
        for name, door in ((n, d) for n in names for d in doors):
            label = f"{name}, {door}"
            if label not in verdicts:
                verdicts[label] = met(ranks, run, name, door)
                if results is not None:
                    store(results, verdicts[label])
            click.echo(f"{label}: {verdicts[label].word} {verdicts[label].text[:300]}")
    finally:
        ranks.stop()
    return verdicts


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a page of Markdown, a row for every script."""
    lines = [
        "# Odd scripts",
        "",
        f"{len(SCRIPTS)} training scripts of five steps whose forward or loss reads or writes Python state, draws, or "
        f"has hooks: run plainly in one process, and split over {RANKS} Gloo ranks (recipe `ddp`) at three doors: "
        '`autopar.compile`; `torch.compile(model, backend="autopar")` with the loss left alone; and the same for a '
        "function of model and loss. *Equal*: the losses agree within 1e-9 in float64, and what forward wrote is the "
        "same. *Refused*: an error that names file and line, whose beginning is shown. Written by",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/parity/odd_scripts.py --markdown benchmarks/results/odd_scripts.md",
        "",
        *table(verdicts, SCRIPTS, DOORS),
    ]
    return "\n".join(lines) + "\n"


def table(verdicts: Mapping[str, Verdict], names: Collection[str], doors: Collection[str]) -> list[str]:
    """The lines of a table with a row for every script and a column for every door, and their numbers on top."""
    rows = [[name, *(_cell(verdicts.get(f"{name}, {door}")) for door in doors)] for name in names]
    counts = {door: Counter[str]() for door in doors}
    for label, found in ((f"{name}, {door}", door) for name in names for door in doors):
        counts[found][verdicts[label].word if label in verdicts else "not run"] += 1
    words = [", ".join(f"{n} {word}" for word, n in sorted(c.items())) for c in counts.values()]
    return markdown_table(("script", *doors), [[f"all {len(names)}", *words], *rows])


def _cell(found: Verdict | None) -> str:
    if found is None:
        return "not run"
    if found.word == "equal":
        return found.word
    first = re.sub(r"/\S*/(?=\w+\.py)", "", found.text.splitlines()[0]).replace("|", "\\|")
    shown = first if len(first) <= _WIDTH else f"{first[:_WIDTH]} ..."
    return f"{found.word}: {shown}"


@click.command()
@click.option("--only", default="", help="Part of the names of the scripts to run.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Where to write the page.")
@click.option("--results", type=click.Path(path_type=Path), help="Where to keep the verdicts.")
def main(only: str, markdown: Path | None, results: Path | None) -> None:
    """Runs all scripts, or some, and exits with 1 if one neither trains as it does plainly nor is refused by a line."""
    verdicts = all_met(verdict, [n for n in SCRIPTS if only in n], DOORS, results)
    if markdown is not None:
        markdown.write_text(page(verdicts))
    sys.exit(any(found.word not in SAFE for found in verdicts.values()))


if __name__ == "__main__":
    main()
