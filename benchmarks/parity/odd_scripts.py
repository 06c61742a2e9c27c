"""Gives every odd script to every door, on two Gloo ranks, and writes whether it trains as it does plainly.

OMP_NUM_THREADS=1 python benchmarks/parity/odd_scripts.py --markdown benchmarks/results/odd_scripts.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import RankFailed, Ranks
from tests.support.odd_scripts import SCRIPTS, Verdict, verdict
from tests.support.scripts import DOORS

RANKS = 2
SAFE = ("equal", "refused")
_WIDTH = 110  # letters of a refusal in the table


def met(ranks: Ranks, name: str, door: str) -> Verdict:
    """The end of a script at a door, on the first rank whose end is not a safe one, else on rank 0."""
    try:
        found: list[Verdict] = ranks.run(verdict, name, door)
    except RankFailed as error:
        return Verdict(f"{name}, {door}", "breaks", str(error))
    return next((each for each in found if each.word not in SAFE), found[0])


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a page of Markdown, a row for every script."""
    rows = [[name, *(_cell(verdicts.get(f"{name}, {door}")) for door in DOORS)] for name in SCRIPTS]
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
        *markdown_table(("script", *DOORS), [*_totals(verdicts), *rows]),
    ]
    return "\n".join(lines) + "\n"


def _totals(verdicts: Mapping[str, Verdict]) -> list[list[str]]:
    counts = {door: Counter[str]() for door in DOORS}
    for name in SCRIPTS:
        for door in DOORS:
            found = verdicts.get(f"{name}, {door}")
            counts[door][found.word if found else "not run"] += 1
    words = [", ".join(f"{n} {word}" for word, n in sorted(c.items())) for c in counts.values()]
    return [[f"all {len(SCRIPTS)}", *words]]


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
    verdicts = {} if results is None else stored(results, Verdict)
    ranks = Ranks(RANKS)
    try:
        for name, door in ((n, d) for n in SCRIPTS if only in n for d in DOORS):
            label = f"{name}, {door}"
            if label not in verdicts:
                verdicts[label] = met(ranks, name, door)
                if results is not None:
                    store(results, verdicts[label])
            click.echo(f"{label}: {verdicts[label].word} {verdicts[label].text[:300]}")
    finally:
        ranks.stop()
    if markdown is not None:
        markdown.write_text(page(verdicts))
    sys.exit(any(found.word not in SAFE for found in verdicts.values()))


if __name__ == "__main__":
    main()
