"""`autopar explain`: the chosen plan in the model's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autopar.cli.options import AUTO, TARGET_HELP, question, question_options
from autopar.cli.output import console, print_json, working, write_files
from autopar.explanation.batches import best_batch
from autopar.explanation.pages import page_of
from autopar.explanation.sheet import Sheet
from autopar.ir.files import check_output


@click.command(
    "explain",
    help=f"""Plan a step of TARGET on a cluster, and say what was chosen and why: the tensors split
over each axis, the collectives and their costs, memory and time, the next best plans and why
they lose, and changes that would lead to another choice. Needs no devices, weights or process group.

{TARGET_HELP}

\b
Examples:
  autopar explain llama3-8b --cluster h100x8x2 --batch 128 --seq 4096
  autopar explain llama3-70b --cluster h100x8x16 --batch 1024 --html report.html --trace step.json
  autopar explain gpt2 --cluster h100x4 --batch auto
  autopar explain path/to/config.json --cluster a100x8 --max-memory 70GB --keep-inside-node tp
  autopar explain gpt3-175b --cluster h100x8x16 --no recompute --pin 'layers.*.mlp.*=tp'
  autopar explain examples.gpt:example --mesh dp=8,tp=8 --recipe dp:zero3,tp:tp+sp
  autopar explain examples.gpt:example --mesh pp=2,dp=2,tp=2 --schedule 1f1b --micro-batches 8
  autopar explain examples.gpt:example --mesh pp=4,dp=2 --recipe pp:interleaved,dp:zero1 --html report.html""",
)
@click.argument("target")
@question_options
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the plan, as autopar.compile(plan=) and verify read it.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write an HTML report: one file, without scripts or network access.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the predicted step as a Chrome trace, for Perfetto.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--verbose", "is_verbose", is_flag=True, help="Also list the sizes that no axis divides.")
def explain_command(
    target: str, save: Path | None, html: Path | None, trace: Path | None, as_json: bool, is_verbose: bool, **given: Any
) -> None:
    check_output(save, html, trace)
    with working() as progress:
        asked = question(target, progress, given, tries_batches=True)
        found = best_batch(asked) if given["batch"] == AUTO else asked.answer()
        progress("writing the report")
        page = page_of(found, target, save, has_document=as_json or html is not None, is_verbose=is_verbose)
    if save is not None:
        assert found.request is not None, "an answer of a search keeps its request"
        asked.on(found.request).whole_plan(found.plan).save(save)
    write_files(page, html, trace)
    if as_json:
        print_json(page.document)
    else:
        console().print(Sheet(found, page))
