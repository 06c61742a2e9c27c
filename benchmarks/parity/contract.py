"""Asks every door what scripts may expect of a module, on two Gloo ranks, and writes whether it is as it is plainly.

OMP_NUM_THREADS=1 python benchmarks/parity/contract.py --markdown benchmarks/results/contract.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.parity.odd_scripts import RANKS, SAFE, all_met, table
from tests.support.contract.behaviour import BEHAVIOURS
from tests.support.contract.verdicts import CONTRACT_DOORS, verdict_of_behaviour
from tests.support.odd.odd_scripts import Verdict


def page(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as a page of Markdown, a row for every behaviour."""
    lines = [
        "# The contract of a module",
        "",
        f"{len(BEHAVIOURS)} behaviours that scripts may expect of a module, asked of a plain module in one process and "
        f"(on {RANKS} Gloo ranks) of a module at six doors: `autopar.compile` with the recipes `ddp`, `zero3`, `tp` "
        "and with two pipeline stages, `autopar.shard_` with `zero3`, and "
        '`torch.compile(..., backend="autopar")`; of each when it is fresh, and after a step of training. *Equal*: all '
        "that the behaviour reads agrees at both moments (numbers within 1e-9 in float64). *Refused*: an error of "
        "autopar, whose beginning is shown. Written by",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/parity/contract.py --markdown benchmarks/results/contract.md",
        "",
        *table(verdicts, BEHAVIOURS, CONTRACT_DOORS),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--only", default="", help="Part of the names of the behaviours to ask for.")
@click.option("--doors", default=",".join(CONTRACT_DOORS), help="Doors to ask, with commas.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Where to write the page.")
@click.option("--results", type=click.Path(path_type=Path), help="Where to keep the verdicts.")
def main(only: str, doors: str, markdown: Path | None, results: Path | None) -> None:
    """Asks for all behaviours, or some, and exits with 1 if one is neither as it is plainly nor refused."""
    verdicts = all_met(verdict_of_behaviour, [n for n in BEHAVIOURS if only in n], doors.split(","), results)
    if markdown is not None:
        markdown.write_text(page(verdicts))
    sys.exit(any(found.word not in SAFE for found in verdicts.values()))


if __name__ == "__main__":
    main()
