"""`autopar fit`: will it fit?"""

from __future__ import annotations

import sys
from typing import Any

import click

from autopar.cli.options import TARGET_HELP, Price, question, question_options
from autopar.cli.output import console, print_json, working
from autopar.explanation.fitting import to_json, will_it_fit
from autopar.explanation.sheet import FitSheet


@click.command(
    "fit",
    help=f"""Say whether a step of TARGET fits: bytes of a rank by kind, the margin, and the changes
that make it fit, by their price in time or money. Exits with status 1 if it does not fit as asked.

{TARGET_HELP}

\b
Examples:
  autopar fit llama3-70b --cluster h100x8x4 --batch 256
  autopar fit llama3-8b --cluster a100x8 --batch 64 --mesh dp=8 --recipe zero1 --micro-batches 1
  autopar fit llama3-8b --cluster h100x8 --batch 64 --recipe ddp --price h100=2.5 --price h200=3.5
  autopar fit config.json --cluster rtx4090x8 --batch 8 --no recompute --json""",
)
@click.argument("target")
@question_options
@click.option(
    "--price",
    "prices",
    multiple=True,
    type=Price(),
    metavar="[GPU=]PRICE",
    help="The price of one device for one hour, in any currency: 2.5 for the device of the cluster, or h200=3.5. May "
    "be repeated. Changes are then ranked by money.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit_command(target: str, as_json: bool, prices: tuple[tuple[str, float], ...], **given: Any) -> None:
    with working() as progress:
        asked = question(target, progress, given)
        own = asked.cluster.hardware.name
        fit = will_it_fit(asked, {name or own: price for name, price in prices})
    if as_json:
        print_json(to_json(fit, target))
    else:
        console().print(FitSheet(target, fit))
    sys.exit(0 if fit.fits else 1)
