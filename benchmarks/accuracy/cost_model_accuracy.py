"""How true the cost model is to published runs of real clusters.

    python benchmarks/accuracy/cost_model_accuracy.py --data DIR [--data DIR] [--json] [--markdown PATH] [--simulate]

Reads every CSV file of training runs in each DIR (or one file), builds each row's model from its
dimensions, prices the row's configuration, and prints per file how far step times and peaks of memory
are off and how well configurations are ranked. Configurations compete within one model, sequence
length, global batch and number of GPUs. Errors and regrets are fractions. "False no" is the number of runs that
are priced as not fitting into memory, and ran (`memory_verdicts.py` tells their parts). Runs with pipeline stages are
told apart once more, by their depth, and compete among themselves.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.errors import AutoparError
from benchmarks.accuracy.metrics import Outcome, false_refusals, oom_accuracy, rankings, summary
from benchmarks.accuracy.pricing import Prediction, price_rows
from benchmarks.accuracy.rows import Row, Skip, is_training_table, rows
from benchmarks.accuracy.simulated import CLOSED, pipeline_of
from benchmarks.accuracy.subjects import Subject, subject
from benchmarks.tables import markdown_table

FIGURES = (
    "time_error_median",
    "time_error_mean",
    "spearman",
    "tau_mean",
    "regret_mean",
    "regret_median",
    "regret_worst",
    "memory_error_median",
    "oom_accuracy",
)

REASONS = ("source", "rows", "skipped because, or used with")
COUNTS = ("source", "used", "skipped", "false no")

PIPELINE_FIGURES = (
    "time_error_median",
    "time_error_mean",
    "time_bias_median",
    "spearman",
    "tau_mean",
    "regret_mean",
    "regret_worst",
    "memory_error_median",
)


@dataclass
class Source:
    """One file: its runs priced, and why others are not."""

    name: str
    subjects: list[Subject] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """What the JSON says of the file."""
        counts = {"rows_used": len(self.outcomes), "rows_skipped": self.skipped.total()}
        counts |= {"false_no": false_refusals(self.outcomes)}
        found = counts | summary(self.outcomes) | {"skipped_because": dict(self.skipped)}
        found |= {"used_with": dict(self.stand_ins())}
        return found | {"pipelines": self.pipelines()}

    def stand_ins(self) -> Counter[str]:
        """What prices take in place of what ran -> number of runs."""
        return Counter(name for s in self.subjects for name in s.row.stand_ins)

    def pipelines(self) -> dict[str, dict[str, Any]]:
        """The figures of the runs with pipeline stages: of all, and by their number of stages."""
        ran = [o for o in self.outcomes if o.stages > 1 and not o.failed]
        depths = sorted({o.stages for o in ran})
        parts = {"all": ran} | {str(p): [o for o in ran if o.stages == p] for p in depths}
        return {name: {"rows": len(o)} | summary(o) for name, o in parts.items() if o}


def evaluate(path: Path, *, simulates: bool = False) -> Source:
    """Prices the rows of one file. Raises AutoparError for a file of another form.

    Pipelines are priced by the closed form where their schedule has one, or all by simulation.
    """
    source = Source(path.stem)
    for row in rows(path):
        try:
            source.subjects.append(_usable(row, simulates))
        except Skip as reason:
            source.skipped[str(reason)] += 1
    source.outcomes = list(_priced(source, simulates))
    return source


def _usable(row: Row | Skip, simulates: bool) -> Subject:
    if isinstance(row, Skip):
        raise row
    if row.suspect:
        raise Skip("marked as suspect in the table")
    if row.step_seconds is None and row.memory_bytes is None and not row.failed:
        raise Skip("neither time nor memory was measured")
    found = subject(row)
    if row.pp > 1 and (simulates or row.schedule.upper() not in CLOSED):
        pipeline_of(found.row)
    return found


def _priced(source: Source, simulates: bool) -> Iterable[Outcome]:
    """Rows of one shape are priced together; a shape that cannot be priced is skipped."""
    alike: dict[object, list[Subject]] = defaultdict(list)
    for each in source.subjects:
        alike[each.shape, each.recompute, each.hardware, each.software].append(each)
    for found in alike.values():
        first = found[0]
        try:
            prices = price_rows(
                [s.row for s in found],
                first.shape,
                first.recompute,
                first.hardware,
                first.software,
                simulates=simulates,
            )
        except (Skip, AutoparError, AssertionError, ArithmeticError, ValueError) as error:
            source.skipped[f"not priced: {str(error).splitlines()[0][:80]}"] += len(found)
            continue
        yield from map(_outcome, found, prices)


def _outcome(s: Subject, price: Prediction) -> Outcome:
    """What a row says beside its price; a table has the memory of rank 0, or of the fullest."""
    at_first = s.row.memory_kind.startswith(("rank 0", "world rank 0"))
    return Outcome(
        s.row.group,
        price.seconds,
        s.row.step_seconds,
        price.first_bytes if at_first else price.worst_bytes,
        s.row.memory_bytes,
        s.capacity_bytes,
        s.row.failed,
        price.worst_bytes,
        s.row.pp,
        s.hardware.name,
        s.row.n_gpus,
    )


def combined(sources: Sequence[Source]) -> dict[str, dict[str, Any]]:
    """Runs and failures of one origin that stand in files of their own, told apart together."""
    joined: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        for origin in {s.row.source for s in source.subjects if s.row.source}:
            joined[origin].append(source)
    return {
        origin: {"files": [s.name for s in found], "oom_accuracy": oom_accuracy([o for s in found for o in s.outcomes])}
        for origin, found in sorted(joined.items())
        if len(found) > 1
    }


def read(data: Path, *, simulates: bool = False) -> tuple[list[Source], dict[str, str]]:
    """The sources of a folder or a file, and why files are left out.

    Raises AutoparError for a file that is named and cannot be read, or where nothing can.
    """
    if data.is_file():
        return [evaluate(data, simulates=simulates)], {}
    left_out: dict[str, str] = {}
    sources = []
    for path in sorted(data.glob("*.csv")):
        try:
            if is_training_table(path):
                sources.append(evaluate(path, simulates=simulates))
            else:
                left_out[path.name] = "no table of training runs"
        except (AutoparError, UnicodeDecodeError) as error:
            left_out[path.name] = str(error)
    if not sources:
        why = "; ".join(left_out.values()) or "it has no CSV files"
        raise AutoparError(f"No table of training runs in {data}: {why}")
    return sources, left_out


def markdown(sources: Sequence[Source], left_out: Mapping[str, str]) -> str:
    """The figures as tables for the documentation, and what is used and what is not."""
    head = (*COUNTS, *(name.replace("_", " ") for name in FIGURES))
    rows = []
    for source in sources:
        figures = source.figures()
        rows.append((*_counts(source.name, figures), *_cells(figures)))
    tables = ["\n".join(markdown_table(head, rows)) + "\n", _pipelines_markdown(sources)]
    tables.append("\n".join(markdown_table(RANKING, ranking_rows(sources))) + "\n")
    tables.append("\n".join(markdown_table(REASONS, reasons(sources, left_out))) + "\n")
    return "\n".join(tables)


RANKING = ("source", "groups", "plans", "first", "within 3 %", "regret median", "regret mean", "regret worst")
NEAR = 0.03  # regret of a choice that counts as the best


def ranking_rows(sources: Sequence[Source]) -> Iterator[tuple[str, ...]]:
    """How often the plan that is priced as the fastest is the fastest, by source and for all of them."""
    found = {source.name: rankings(source.outcomes) for source in sources}
    found["all"] = [each for group in found.values() for each in group]
    for name, ranked in found.items():
        regrets = [each.regret for each in ranked]
        if regrets:
            first, near = (sum(r <= most for r in regrets) / len(regrets) for most in (0.0, NEAR))
            figures = (first, near, statistics.median(regrets), statistics.fmean(regrets), max(regrets))
            plans = sum(each.plans for each in ranked)
            yield name, str(len(regrets)), str(plans), *(f"{figure:.1%}" for figure in figures)


def reasons(sources: Sequence[Source], left_out: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Source, number of rows, and why they are skipped, or what their prices take in place of what ran."""
    for source in sources:
        for reason, count in source.skipped.most_common():
            yield source.name, str(count), reason
        for name, count in source.stand_ins().most_common():
            yield source.name, str(count), f"used: {name}"
    for name, reason in left_out.items():
        yield name, "all", reason


def _pipelines_markdown(sources: Sequence[Source]) -> str:
    head = ("source", "stages", "rows", *(name.replace("_", " ") for name in PIPELINE_FIGURES))
    return "\n".join(markdown_table(head, _pipeline_rows(sources))) + "\n"


def _pipeline_rows(sources: Sequence[Source]) -> Iterable[tuple[str, ...]]:
    for source in sources:
        for stages, figures in source.pipelines().items():
            yield source.name, stages, str(figures["rows"]), *_cells(figures, PIPELINE_FIGURES)


def _counts(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    return name, *(str(figures[each]) for each in ("rows_used", "rows_skipped", "false_no"))


def _cells(figures: Mapping[str, Any], names: Sequence[str] = FIGURES) -> list[str]:
    return [_cell(name, figures[name]) for name in names]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if name in ("spearman", "tau_mean") else f"{value:.1%}"


def show(sources: Sequence[Source], left_out: Mapping[str, str]) -> None:
    """Prints the figures, and the reasons for what is left out."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    table = Table(*COUNTS, *(name.replace("_", " ") for name in FIGURES))
    why = Table(*REASONS)
    for source in sources:
        figures = source.figures()
        table.add_row(*_counts(source.name, figures), *_cells(figures))
    for each in reasons(sources, left_out):
        why.add_row(*each)
    ranking = Table(*RANKING)
    for row in ranking_rows(sources):
        ranking.add_row(*row)
    pipelines = Table("source", "stages", "rows", *(n.replace("_", " ") for n in PIPELINE_FIGURES))
    for row in _pipeline_rows(sources):
        pipelines.add_row(*row)
    console.print(table)
    console.print(pipelines)
    console.print(ranking)
    console.print(why)
    for origin, found in combined(sources).items():
        if found["oom_accuracy"] is not None:
            files = " and ".join(found["files"])
            console.print(f"{origin}: {files} together tell {found['oom_accuracy']:.1%} of failures")


@click.command(help=__doc__)
@click.option(
    "--data",
    "folders",
    required=True,
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="A folder or a file; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the tables there.")
@click.option("--simulate", "simulates", is_flag=True, help="Run every pipeline action by action.")
def main(folders: Sequence[Path], as_json: bool, page: Path | None, simulates: bool) -> None:
    try:
        found = [read(each, simulates=simulates) for each in folders]
    except (AutoparError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error
    sources = [source for each, _ in found for source in each]
    left_out = {name: why for _, each in found for name, why in each.items()}
    if page is not None:
        page.write_text(markdown(sources, left_out))
    if not as_json:
        show(sources, left_out)
        return
    result = {
        "sources": {source.name: source.figures() for source in sources},
        "files_skipped": left_out,
        "combined": combined(sources),
    }
    click.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
