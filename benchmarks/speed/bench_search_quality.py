"""The law of the search: by the price that explain prints, nothing that a person can name is better.

    python benchmarks/speed/bench_search_quality.py --results runs/quality.jsonl [--named 6] [--markdown PATH]

A question is a model on a cluster at a batch, with its mesh open or given. It is answered with everything else
open; then some of what a person can name is asked for: a mesh, recipes, a schedule, micro-batches, recomputation.
The law is broken where a named answer fits and the open one does not exist, or is slower by more than 0.1 %.
What is named is drawn at random by a seed, because all of it would take days. Results are added to the file as
they come, and a question that stands there is not asked again.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.cost_model import find_cluster
from autopar.cost_model.machines.software import with_eager_runs
from autopar.errors import AutoparError
from autopar.explanation.advice import EXPLORED_BATCH, Question
from autopar.explanation.explanation import Explanation
from autopar.ir import Mesh
from autopar.search.request.request import Request
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table, plan_words

# Name of a preset -> tokens of a sequence; None for images.
MODELS: Mapping[str, int | None] = {
    "gpt2": 1024,
    "bert-large": 512,
    "vit-h": None,
    "llama3-8b": 4096,
    "mixtral-8x7b": 4096,
    "gpt2-xl": 1024,
}
# Cluster and mesh; "" leaves the mesh open.
PLACES = (
    ("h100x4", "dp=4"),
    ("h100x8", "dp=2,tp=4"),
    ("h100x8", ""),
    ("a100x8x2", ""),
    ("h100x8x2", "pp=2,dp=8"),
    ("a100-40x8x2", "dp=16"),
)
BATCHES = (16, 64, 256)
# Single questions beside the product of models, places and batches, with the tokens of a sequence.
MORE = (
    ("llama3-70b", 4096, "h100x8x2", "", 16),
    ("llama3-8b", 4096, "h100x8x32", "dp=8,dp_inner=8,tp=4", 128),
    ("gpt2-xl", 1024, "h100x8x2", "dp=2,dp_inner=4,tp=2", 32),
)
TOLERANCE = 1.001
ZERO = ("ddp", "zero1", "zero2", "zero3")
TENSOR = ("tp", "tp+sp")


@dataclass(frozen=True)
class Found:
    """A question with its answers.

    Attributes:
        name: model, cluster, mesh and batch.
        open_seconds: price of the open answer per step; None where the search refused.
        open_plan: plan of the open answer in words, or the reason why there is none.
        best_seconds: price of the fastest named answer that fits; None where none does.
        best_named: the named choices of that answer, in words.
        asked: number of things that were named.
        search_seconds: processor time of the open answer without the capture of the model.
    """

    name: str
    open_seconds: float | None
    open_plan: str
    best_seconds: float | None
    best_named: str
    asked: int
    search_seconds: float

    @property
    def ratio(self) -> float | None:
        """The open answer's price over the price of the best named answer."""
        if self.open_seconds is None or self.best_seconds is None:
            return None
        return self.open_seconds / self.best_seconds

    @property
    def breaks_the_law(self) -> bool:
        """Whether something that was named is better than the open answer."""
        if self.best_seconds is None:
            return False
        return self.open_seconds is None or self.open_seconds > TOLERANCE * self.best_seconds


def questions() -> Iterator[tuple[str, str, str, int]]:
    """(model, cluster, mesh, batch) of every question."""
    for model, (cluster, mesh), batch in itertools.product(MODELS, PLACES, BATCHES):
        yield model, cluster, mesh, batch
    for model, _, cluster, mesh, batch in MORE:
        yield model, cluster, mesh, batch


def tokens(model: str) -> int | None:
    """Tokens of a sequence in the questions about a model; None for images."""
    return {**MODELS, **{each[0]: each[1] for each in MORE}}[model]


def named(ranks: int, mesh: str, batch: int) -> Iterator[dict[str, Any]]:
    """Everything that is named for a question, as fields of a request."""
    for sizes in [dict(Mesh.parse(mesh).axes)] if mesh else list(_shapes(ranks)):
        data = sizes.get("dp", 1) * sizes.get("dp_inner", 1)
        counts = [m for m in (1, 2, 4, 8, 16) if batch % (m * data) == 0]
        schedules = ("1f1b", "gpipe", "zb", "zbv") if sizes.get("pp", 1) > 1 else (None,)
        known = {axis: TENSOR if axis == "tp" else ZERO for axis in sizes if axis != "pp"}
        recipes = [
            ",".join(map(":".join, zip(known, each, strict=True))) for each in itertools.product(*known.values())
        ]
        for recipe, count, again, schedule in itertools.product(recipes, counts, ("none", "full"), schedules):
            text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
            yield {
                "mesh": text,
                "recipe": recipe or "auto",
                "micro_batches": count,
                "recompute": again,
                "schedule": schedule,
            }


def _shapes(ranks: int) -> Iterator[dict[str, int]]:
    """Meshes of pipeline, data and tensor parallelism, whose tensor groups stay in a node of 8."""
    for pp, tp in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        if ranks % (pp * tp) == 0:
            sizes = {"pp": pp, "dp": ranks // (pp * tp), "tp": tp}
            yield {axis: size for axis, size in sizes.items() if size > 1}


def ask(model: str, cluster: str, mesh: str, batch: int, count: int) -> Found:
    """Asks a question openly, and with `count` things named; the model is captured once."""
    place = with_eager_runs(find_cluster(cluster))
    asked = Request.on(place, batch=batch, mesh=Mesh.parse(mesh) if mesh else None)
    question = Question(model, asked, tokens(model))
    question.captured(EXPLORED_BATCH)
    start_seconds = time.process_time()
    best, refused = _answer(question, asked)
    search_seconds = time.process_time() - start_seconds
    name = f"{model} {cluster} {mesh or 'open'} b{batch}"
    choices = list(named(place.ranks, mesh, batch))
    drawn = random.Random(name).sample(choices, min(count, len(choices)))
    answers = [(each, _answer(question, asked, each)[0]) for each in drawn]
    fitting = [(a.step_seconds, _words(each)) for each, a in answers if a is not None and a.fits]
    seconds, words = min(fitting, default=(None, ""))
    return Found(
        name,
        best.step_seconds if best and best.fits else None,
        plan_words(best) if best else refused,
        seconds,
        words,
        len(drawn),
        search_seconds,
    )


def _answer(
    question: Question, asked: Request, fields: Mapping[str, Any] | None = None
) -> tuple[Explanation | None, str]:
    """The answer with these fields named, of which a request may refuse some together; else why there is none."""
    try:
        request = asked.but(**{**fields, "mesh": Mesh.parse(fields["mesh"])}) if fields else asked
        return replace(question, request=request).answer(), ""
    except AutoparError as error:
        return None, str(error).splitlines()[0][:120]


def _words(fields: Mapping[str, Any]) -> str:
    return (
        f"{fields['mesh']} {fields['recipe']}, {fields['schedule'] or 'no stages'}, "
        f"{fields['micro_batches']} micro-batches, recompute {fields['recompute']}"
    )


def summary(found: Sequence[Found]) -> str:
    """How often the law is broken."""
    broken = [each for each in found if each.breaks_the_law]
    asked = sum(each.asked for each in found)
    ratios = [each.ratio for each in found if each.ratio is not None]
    worst = f"; the highest ratio is {max(ratios):.4f}" if ratios else ""
    return f"{len(found)} questions, {asked} named alternatives: the law is broken in {len(broken)}{worst}."


HEADS = ("question", "open answer", "s", "best of what was named", "s", "ratio", "search, s")


def rows(found: Sequence[Found]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, broken laws first."""
    for each in sorted(found, key=lambda f: (not f.breaks_the_law, -(f.ratio or 0.0))):
        yield (
            each.name,
            each.open_plan,
            _number(each.open_seconds),
            each.best_named or "nothing fits",
            _number(each.best_seconds),
            _number(each.ratio),
            f"{each.search_seconds:.1f}",
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@click.command(help=__doc__)
@click.option("--results", default=Path("runs/search_quality.jsonl"), type=click.Path(path_type=Path))
@click.option("--named", "count", default=6, help="Named alternatives of every question.")
@click.option("--only", default="", help="Ask only the questions whose name has this text.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table there.")
def main(results: Path, count: int, only: str, page: Path | None) -> None:
    known = stored(results, Found)
    chosen = [each for each in questions() if only in f"{each[0]} {each[1]} {each[2] or 'open'} b{each[3]}"]
    names = [f"{model} {cluster} {mesh or 'open'} b{batch}" for model, cluster, mesh, batch in chosen]
    for name, each in track(list(zip(names, chosen, strict=True)), console=Console(stderr=True)):
        if name not in known:
            known[name] = ask(*each, count)
            store(results, known[name])
    found = [known[name] for name in names]
    table = Table(*HEADS)
    for row in rows(found):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print(summary(found))
    if page is not None:
        lines = [summary(found), "", *markdown_table(HEADS, rows(found))]
        page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
