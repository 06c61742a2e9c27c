"""`autopar diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cli.output import console, print_json
from autopar.explanation.differences import Side, costs, differences, to_json, verdict


@click.command(
    "diff",
    help="""Describe the differences between two plans, and their costs.

A.json and B.json are plans that `explain --save` wrote, or documents of `explain --json`, which also
know costs.

\b
Examples:
  autopar explain llama3-8b --cluster h100x8 --no zero1 --json > a.json
  autopar explain llama3-8b --cluster h100x8 --json > b.json
  autopar diff a.json b.json""",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff_command(a: Path, b: Path, as_json: bool) -> None:
    sides = Side.load(a), Side.load(b)
    if as_json:
        print_json(to_json(*sides))
    else:
        console().print(_sheet(*sides))


def _sheet(a: Side, b: Side) -> RenderableType:
    found = differences(a, b)
    lines = [Text(verdict(a, b), style="bold"), Text()]
    lines += [Text(str(each)) for each in found] or [Text("The plans are the same.")]
    for cost in dict.fromkeys(each.cost for each in costs(a, b)):
        lines += [Text(), Text(cost.capitalize(), style="bold")]
        lines += [Text(f"  {each}") for each in costs(a, b) if each.cost == cost]
    return Group(*lines)
