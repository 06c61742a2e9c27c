"""Memory of published runs by parts: what the price of each says it keeps, beside its device and its measured peak.

    python benchmarks/accuracy/memory_verdicts.py --data DIR [--data DIR] [--all] [--parts ROW] [--markdown PATH]

Shows the runs that the cost model takes for too large and that ran ("false no"), each with the parts of its
fullest pipeline stage in GiB; with --all, also every run whose peak was measured. `--parts ROW` shows one run with
its saved activations by the op that keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs as a script

from autopar.cost_model.arith import Quantity
from autopar.cost_model.steps.run import STAGES, Term, total
from autopar.errors import AutoparError
from benchmarks.accuracy.cost_model_accuracy import Source, read
from benchmarks.accuracy.pricing import step_of
from benchmarks.accuracy.rows import Skip
from benchmarks.accuracy.subjects import Subject
from benchmarks.tables import markdown_table

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer", "buffers", "saved activations", "transient peak", "reserved")
HEADS = (
    "source",
    "row",
    "model",
    "GPUs",
    "layout",
    "precision",
    "recompute",
    "stage",
    "device",
    "measured",
    "priced",
    *PARTS,
)


@dataclass(frozen=True)
class Verdict:
    """The memory of one run, as it is priced.

    Attributes:
        source: name of the table.
        subject: the run.
        stage: the fullest pipeline stage, one of "first", "middle" and "last".
        terms: parts of its peak, in bytes.
    """

    source: str
    subject: Subject
    stage: str
    terms: tuple[Term, ...]

    @property
    def priced_bytes(self) -> float:
        return _number(total(self.terms))

    @property
    def is_false_no(self) -> bool:
        """Whether the run is priced as larger than its device, and ran."""
        return not self.subject.row.failed and self.priced_bytes > self.subject.capacity_bytes

    def cells(self) -> tuple[str, ...]:
        """The row of the table, in GiB."""
        row = self.subject.row
        layout = f"dp={row.dp} tp={row.tp} pp={row.pp}x{row.chunks} zero{self.subject.shape.zero_stage}"
        measured = "-" if row.memory_bytes is None else _gib(row.memory_bytes)
        by_name = {term.name: _number(term.value) for term in self.terms}
        return (
            self.source,
            row.row_id,
            row.model,
            f"{row.n_gpus} {self.subject.hardware.name}",
            layout,
            row.precision,
            str(self.subject.recompute),
            self.stage,
            _gib(self.subject.capacity_bytes),
            measured,
            _gib(self.priced_bytes),
            *(_gib(by_name[name]) for name in PARTS),
        )


def verdict(source: str, subject: Subject) -> Verdict:
    """Prices the memory of one run. Raises Skip for what has no price."""
    step = step_of([subject.row], subject.shape, subject.recompute, subject.hardware, subject.software)
    by_stage = {stage: step.memory(stage) for stage in STAGES}
    stage = max(by_stage, key=lambda each: _number(total(by_stage[each])))
    return Verdict(source, subject, stage, by_stage[stage])


def verdicts(sources: Iterable[Source]) -> Iterator[Verdict]:
    """The runs of tables that ran and have a price; cost_model_accuracy counts the others."""
    for source in sources:
        for subject in source.subjects:
            if not subject.row.failed:
                with suppress(Skip, AutoparError):
                    yield verdict(source.name, subject)


def _number(value: Quantity) -> float:
    """The figure of the only run of a step."""
    return float(np.broadcast_to(value, 1)[0])


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"


def parts_of(found: Verdict) -> Iterator[tuple[str, ...]]:
    """The parts of every term that has some, the largest first."""
    for term in found.terms:
        for part in sorted(term.parts, key=lambda each: -_number(each.value)):
            if _number(part.value) > 0:
                yield term.name, part.name, f"{_number(part.value) / GIB:.2f}"


@click.command(help=__doc__)
@click.option("--data", "folders", required=True, multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--all", "shows_all", is_flag=True, help="Also runs whose peak was measured.")
@click.option("--parts", "row_id", default="", help="Show the parts of the run with this row_id.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table there.")
def main(folders: Sequence[Path], shows_all: bool, row_id: str, page: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 240)
    found = list(verdicts(source for each in folders for source in read(each)[0]))
    if row_id:
        for each in (each for each in found if each.subject.row.row_id == row_id):
            for cells in parts_of(each):
                console.print(*cells)
        return
    shown = [v for v in found if v.is_false_no or (shows_all and v.subject.row.memory_bytes is not None)]
    table = Table(*HEADS)
    for each in shown:
        table.add_row(*each.cells())
    console.print(table)
    console.print(f"{sum(v.is_false_no for v in found)} of {len(found)} runs that ran do not fit.")
    if page is not None:
        page.write_text("\n".join(markdown_table(HEADS, [v.cells() for v in shown])) + "\n")


if __name__ == "__main__":
    main()
