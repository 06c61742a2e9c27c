"""`autopar compare`: ways to run a model, ranked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from autopar.cli.options import POSITIVE, TARGET_HELP, question, question_options
from autopar.cli.output import console, print_json, working, write_files
from autopar.cost_model.breakdown import Candidate, pareto
from autopar.explanation.comparison import best_that_fits, compared
from autopar.explanation.pages import page_of
from autopar.ir.files import check_output
from autopar.views import CandidateTable


@click.command(
    "compare",
    help=f"""Rank the ways to run a step of TARGET on a cluster: the best of every mesh and recipe with its
time, memory, traffic and what binds it. A + marks the Pareto front of time against memory.

{TARGET_HELP}

\b
Examples:
  autopar compare llama3-8b --cluster h100x8x2 --batch 128
  autopar compare gpt3-175b --cluster h100x8x16 --batch 1536 --top 30 --no zero3 --html compare.html""",
)
@click.argument("target")
@question_options
@click.option("--top", default=20, type=POSITIVE, help="How many to show.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a report with the picture of time against memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare_command(target: str, top: int, html: Path | None, as_json: bool, **given: Any) -> None:
    check_output(html)
    with working() as progress:
        asked = question(target, progress, given)
        bound = asked.bound_bytes
        best = best_that_fits(asked.settings, bound)
        rows = compared(asked.settings, best, bound, top)
        if html is not None:
            found = dataclasses.replace(asked.answer(), candidates=rows)
            write_files(page_of(found, target), html, None)
    if as_json:
        print_json(_document(rows, len(asked.settings), bound))
        return
    console().print(asked.text, highlight=False)
    console().print(CandidateTable(rows, "fastest"))
    if asked.cluster.hardware.kinds:
        console().print("Estimates of pipelines assume stages cut by what each kind can do; explain searches the cuts.")
    console().print(f"{len(rows)} of {len(asked.settings)} priced; bound {bound / 1e9:.1f} GB a rank")
    if best is None:
        console().print(asked.why_nothing_fits(), style="bold red")


def _document(rows: tuple[Candidate, ...], priced: int, bound_bytes: int) -> dict[str, Any]:
    front = pareto(tuple(each for each in rows if each.fits))
    return {
        "memory_bound_bytes": bound_bytes,
        "settings_priced": priced,
        "candidates": [{**dataclasses.asdict(each), "on_pareto_front": each in front} for each in rows],
    }
