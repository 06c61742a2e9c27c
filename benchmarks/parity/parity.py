"""Parity of plans drawn at random with one device, over small architectures and meshes.

    OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds 5 --markdown docs/parity.md

Every choice of every op and every storage layout is drawn; all ranks are simulated in one process; loss
and every gradient of every rank are compared with the eager model's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from autopar.ir import Mesh
from autopar.proof.random_plan import random_plan
from autopar.proof.verdict import VerifyReport
from autopar.proof.verify import Subject

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.zoo.models import NAMES, build

MESHES = ("a=2", "a=4", "a=2,b=2", "a=2,b=2,c=2")


@dataclass(frozen=True)
class Row:
    """One architecture: the worst of its plans."""

    name: str
    reports: tuple[VerifyReport, ...]
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        loss = max(r.loss_error for r in self.reports)
        worst = max(self.reports, key=lambda r: r.worst_gradient_error)
        passed = sum(r.passed for r in self.reports)
        return (
            self.name, f"{passed} of {len(self.reports)}", worst.arithmetic, f"{loss:.1e}",
            f"{worst.worst_gradient_error:.1e}", worst.worst_parameter, f"{self.seconds:.0f}",
        )  # fmt: skip


COLUMNS = (
    "architecture",
    "plans passed",
    "arithmetic",
    "loss error",
    "gradient error",
    "worst at",
    "s",
)


def measure(name: str, meshes: list[Mesh], seeds: int) -> Row:
    """Draws and compares `seeds` plans on every mesh."""
    start_seconds = time.perf_counter()
    model, args = build(name)
    subject = Subject.of(model, args)
    graph, fingerprint = subject.prepared.analysis.graph, subject.prepared.captured.fingerprint
    plans = (
        random_plan(graph, mesh, seed=seed, fingerprint=fingerprint)
        for mesh in meshes
        for seed in range(seeds)
    )
    reports = tuple(subject.compare(plan) for plan in plans)
    return Row(name, reports, time.perf_counter() - start_seconds)


def markdown(rows: list[Row], seeds: int) -> str:
    """The table as a page."""
    lines = [
        "# Parity of random plans",
        "",
        f"{seeds} plans drawn at random on each of the meshes {', '.join(MESHES)}, all ranks simulated, against the",
        "eager model on one device; relative errors, the worst of all plans and ranks. Made by",
        f"`OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds {seeds} --markdown docs/parity.md`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--names", default=",".join(NAMES), help="Architectures, separated by commas.")
@click.option("--seeds", default=5, help="Plans on each mesh.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(names: str, seeds: int, path: Path | None) -> None:
    """Print a row per architecture; exit 1 if any plan fails."""
    console = Console()
    meshes = [Mesh.parse(text) for text in MESHES]
    rows = []
    for name in track(names.split(","), description="architectures", console=console):
        rows.append(measure(name, meshes, seeds))
        console.print("  ".join(rows[-1].cells))
    if path is not None:
        path.write_text(markdown(rows, seeds))
    sys.exit(0 if all(r.passed for row in rows for r in row.reports) else 1)


if __name__ == "__main__":
    main()
