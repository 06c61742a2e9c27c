"""Gives every loop of a script's own to every door, on two Gloo ranks, and writes whether it ends as it does plainly.

OMP_NUM_THREADS=1 python benchmarks/parity/own_loops.py --markdown benchmarks/results/own_loops.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.parity.odd_scripts import RANKS, SAFE, all_met, table
from tests.support.odd.odd_scripts import Verdict
from tests.support.own_loops import LOOP_DOORS, LOOPS, verdict_of_loop


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a page of Markdown, a row for every loop."""
    lines = [
        "# Loops of the script's own",
        "",
        f"{len(LOOPS)} training loops as people write them for one device, with `model(x)`, a loss outside of it "
        f"and `loss.backward()`: run plainly in one process, and on {RANKS} Gloo ranks with `autopar.compile(model, "
        "...)` under the recipes `ddp` and `zero3`, with everything open, and with two pipeline stages, and under "
        '`torch.compile(..., backend="autopar")`. *Equal*: all losses, norms and a sum over all parameters at the end '
        "agree within 1e-9 in float64. *Refused*: an error of autopar, whose beginning is shown. Written by",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/parity/own_loops.py --markdown benchmarks/results/own_loops.md",
        "",
        *table(verdicts, LOOPS, LOOP_DOORS),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--only", default="", help="Part of the names of the loops to run.")
@click.option("--doors", default=",".join(LOOP_DOORS), help="Doors to run, with commas.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Where to write the page.")
@click.option("--results", type=click.Path(path_type=Path), help="Where to keep the verdicts.")
def main(only: str, doors: str, markdown: Path | None, results: Path | None) -> None:
    """Runs all loops, or some, and exits with 1 if one neither ends as it does plainly nor is refused."""
    verdicts = all_met(verdict_of_loop, [n for n in LOOPS if only in n], doors.split(","), results)
    if markdown is not None:
        markdown.write_text(page(verdicts))
    sys.exit(any(found.word not in SAFE for found in verdicts.values()))


if __name__ == "__main__":
    main()
