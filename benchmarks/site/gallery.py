"""The gallery of the site: reports of well-known models on well-known clusters, and the page that lists them.

python -m benchmarks.site.gallery            asks every question (about ten minutes of one core)
python -m benchmarks.site.gallery llama3-8b  asks the questions about one model again
python -m benchmarks.site.gallery --page     writes the page again from the stored figures
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from autopar import units
from autopar.cli.explain import explain_command
from autopar.cli.options import question
from autopar.explanation.explanation import Explanation
from autopar.explanation.pages import page_of
from autopar.ir import Mesh
from autopar.search.request.request import silent
from autopar.views import write_html
from benchmarks.tables import markdown_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
FOLDER = ROOT / "docs" / "gallery"
FIGURES = FOLDER / "figures.json"
START, STOP = "<!-- the table: begin -->", "<!-- the table: end -->"

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One row of the gallery.

    Attributes:
        model: name of a preset.
        cluster: GPU x ranks in a node x nodes.
        batch: number of samples of a step on all ranks.
        seq: number of tokens of a sequence; None for an image model.
    """

    model: str
    cluster: str
    batch: int
    seq: int | None = None

    @property
    def name(self) -> str:
        """The name that the report and its figures are stored under.

        >>> Question("llama3-8b", "h100x8x2", 128, 4096).name
        'llama3-8b-h100x8x2'
        """
        return f"{self.model}-{self.cluster}"

    @property
    def command(self) -> str:
        """The command that prints the same answer.

        >>> Question("llama3-8b", "h100x8x2", 128, 4096).command
        'autopar explain llama3-8b --cluster h100x8x2 --batch 128 --seq 4096'
        """
        seq = f" --seq {self.seq}" if self.seq else ""
        return f"autopar explain {self.model} --cluster {self.cluster} --batch {self.batch}{seq}"

    def answer(self) -> Explanation:
        """The plan with its costs, as the command finds it: its own parser reads the options."""
        _, _, *arguments = self.command.split()
        given = explain_command.make_context("explain", arguments).params
        return question(given["target"], silent, given).answer()


QUESTIONS = (
    Question("bert-large", "a100x8", 256, 512),
    Question("vit-h", "a100x8", 512),
    Question("gpt2-xl", "h100x8", 128, 1024),
    Question("llama3-8b", "h100x8x2", 128, 4096),
    Question("llama3-8b", "a100-40x8x2", 128, 4096),
    Question("t5-11b", "a100x8x2", 256, 512),
    Question("mixtral-8x7b", "h100x8x4", 256, 4096),
    Question("llama3-70b", "h100x8x16", 1024, 8192),
    Question("gpt3-175b", "h100x8x16", 1536, 2048),
)


def figures_of(asked: Question, found: Explanation) -> dict[str, Any]:
    """The figures of a row, in SI units."""
    plan, pipeline = found.plan, found.plan.pipeline
    return {
        "command": asked.command,
        "mesh": str(plan.world_mesh),
        "recipe": str(plan.recipe),
        "schedule": pipeline.schedule if pipeline else "",
        "stages": pipeline.stages if pipeline else 1,
        "micro_batches": plan.micro_batches,
        "recompute": plan.recompute if isinstance(plan.recompute, str | int) else "single ops",
        "step_seconds": found.step_seconds,
        "memory_bytes": found.memory_bytes,
        "memory_bound_bytes": found.bound_bytes,
        "mfu": found.mfu,
    }


HEADS = (
    "report",
    "cluster",
    "batch",
    "step",
    "memory of a rank",
    "utilization",
    "mesh",
    "recipe",
    "stages",
    "micro-batches",
    "recomputation",
)


def row(asked: Question, figures: Figures) -> list[str]:
    """The cells of a row of the page."""
    tokens = f" x {asked.seq:,}" if asked.seq else ""
    return [
        f"[{asked.model}](gallery/{asked.name}.html)",
        asked.cluster,
        f"{asked.batch:,}{tokens}",
        units.format_seconds(figures["step_seconds"]),
        units.format_bytes(figures["memory_bytes"]),
        f"{100 * figures['mfu']:.1f} %",
        _axes(Mesh.parse(figures["mesh"])),
        figures["recipe"],
        f"{figures['schedule']}, {figures['stages']} stages" if figures["schedule"] else "no stages",
        str(figures["micro_batches"]),
        _recomputed(figures["recompute"]),
    ]


def _axes(mesh: Mesh) -> str:
    """The axes of several ranks, as the report has them."""
    return ",".join(f"{name}={size}" for name, size in mesh.axes if size > 1)


def _recomputed(which: str | int) -> str:
    return which if isinstance(which, str) else f"{units.counted(which, 'block')} a stage"


def table(stored: Mapping[str, Figures]) -> str:
    """The table of the page: a row for every question.

    Args:
        stored: figures of every question, by its name.
    """
    rows = [row(asked, stored[asked.name]) for asked in QUESTIONS]
    return "\n".join(markdown_table(HEADS, rows, text_columns=None))


def commands() -> str:
    """The commands behind the rows, as the page shows them."""
    return "\n".join(["```sh", *(asked.command for asked in QUESTIONS), "```"])


def with_table(page: str, stored: Mapping[str, Figures]) -> str:
    """The page with its table and commands written anew."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(STOP)
    assert rest and after, f"the page has lost {START} or {STOP}"
    made = f"Asked on {stored['made']['date']}, at commit `{stored['made']['commit']}`."
    return "\n\n".join((before + START, made, table(stored), commands(), STOP + after))


def stored_figures() -> dict[str, Figures]:
    """The figures of all questions by name, and the date and commit under `made`."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def _commit() -> str:
    """The last commit of main that the code stands on; a branch's own commits may be renamed when it lands."""
    base = subprocess.check_output(("git", "merge-base", "HEAD", "main"), cwd=ROOT, text=True)
    return base[:7]


def ask(questions: Sequence[Question]) -> None:
    """Writes the report and the figures of every question."""
    stored = stored_figures()
    commit = _commit()
    FOLDER.mkdir(exist_ok=True)
    for asked in questions:
        found = asked.answer()
        page = page_of(found, asked.model, has_document=False)
        write_html(page, FOLDER / f"{asked.name}.html")
        stored[asked.name] = figures_of(asked, found)
        stored["made"] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit}
        FIGURES.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        click.echo(f"{asked.name}: {stored[asked.name]}")


@click.command(help="Ask the questions of the gallery about MODELS (all without one).")
@click.argument("models", nargs=-1)
@click.option("--page", is_flag=True, help="Ask nothing; write the page from the stored figures.")
def main(models: tuple[str, ...], page: bool) -> None:
    if not page:
        ask([q for q in QUESTIONS if not models or q.model in models])
    if all(asked.name in stored_figures() for asked in QUESTIONS):
        PAGE.write_text(with_table(PAGE.read_text(), stored_figures()))


if __name__ == "__main__":
    main()
