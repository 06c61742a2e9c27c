"""Parity of plans drawn at random with one device, over small architectures and meshes.

    OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds 5 --markdown benchmarks/results/parity.md
    OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds 1 --meshes "a=2,b=2" \
        --dtypes float32,bfloat16 --markdown benchmarks/results/parity_rounding.md
    OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds 1 --dropout 0.1 \
        --markdown benchmarks/results/parity_dropout.md

Every choice of every op and every storage layout is drawn, and in about a third of the plans single ranks run a third
of the ops; all ranks are simulated in one process; loss and every gradient of every rank are compared with the eager
model's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from autopar.ir import Mesh, Plan, runs_alone
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject
from autopar.proof.verdict import VerifyReport

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.tables import markdown_table
from benchmarks.zoo.models import NAMES, build

MESHES = ("a=2", "a=4", "a=2,b=2", "a=2,b=2,c=2")


@dataclass(frozen=True)
class Row:
    """One architecture: the worst of its plans.

    Attributes:
        name: name of the architecture.
        reports: the comparison of every plan with one device.
        lone: number of plans in which one rank runs some ops alone.
        seconds: duration of all comparisons.
        draws: number of ops that draw random numbers.
    """

    name: str
    reports: tuple[VerifyReport, ...]
    lone: int
    seconds: float
    draws: int

    @property
    def cells(self) -> tuple[str, ...]:
        loss = max(r.loss_error for r in self.reports)
        worst = max(self.reports, key=lambda r: r.worst_gradient_error)
        passed = sum(r.passed for r in self.reports)
        return (
            self.name,
            str(self.draws),
            f"{passed} of {len(self.reports)}",
            str(self.lone),
            worst.arithmetic,
            f"{loss:.1e}",
            f"{worst.worst_gradient_error:.1e}",
            worst.worst_parameter,
            self._nearest,
            f"{self.seconds:.0f}",
        )

    @property
    def _nearest(self) -> str:
        """The largest share of its bound that an error has in the model's own arithmetic."""
        shares = [r.worst_rounding.share for r in self.reports if r.worst_rounding is not None]
        return f"{max(shares):.3f}" if shares else "-"


COLUMNS = (
    "architecture",
    "ops that draw",
    "plans passed",
    "with ops on one rank",
    "arithmetic",
    "loss error",
    "gradient error",
    "worst at",
    "share of the bound",
    "s",
)


def measure(name: str, meshes: list[Mesh], seeds: range, dtype: torch.dtype | None, dropout: float) -> Row:
    """Draws and compares a plan of every seed on every mesh, of a model in the widest or in a given element type."""
    start_seconds = time.perf_counter()
    model, args = build(name, dtype=dtype, dropout=dropout)
    subject = Subject.of(model, args)
    graph, fingerprint = subject.prepared.analysis.graph, subject.prepared.captured.fingerprint
    plans = [random_plan(graph, mesh, seed=seed, fingerprint=fingerprint) for mesh in meshes for seed in seeds]
    reports = tuple(subject.compare(plan) for plan in plans)
    seconds = time.perf_counter() - start_seconds
    return Row(name, reports, sum(map(has_lone_ops, plans)), seconds, len(subject.streams.ops))


def has_lone_ops(plan: Plan) -> bool:
    """Whether one rank of an axis runs some op alone."""
    return any(map(runs_alone, plan.ops.values()))


def markdown(rows: list[Row], seeds: range, meshes: str, dtypes: str, dropout: float) -> str:
    """The table as a page."""
    lines = [
        "# Parity of random plans" + (" with dropout" if dropout else ""),
        "",
        f"Plans drawn at random, {len(seeds)} on each of the meshes {meshes}, all ranks simulated, against the eager",
        "model on one device in float64. Errors are relative and in float64 arithmetic, the worst of all plans and",
        "ranks. In the model's own arithmetic an error is given as a share of its bound, see",
        "[verify](../../docs/verify.md). In",
        f"{sum(row.lone for row in rows)} of {sum(len(row.reports) for row in rows)} plans single ranks run some ops "
        "alone ([owners](../../docs/replicas.md#ops-on-one-rank)). Made by",
        f"`OMP_NUM_THREADS=1 python benchmarks/parity/parity.py --seeds {len(seeds)} --first {seeds.start} "
        f"--meshes '{meshes}' --dtypes '{dtypes}'" + (f" --dropout {dropout}`." if dropout else "`."),
        "",
        *markdown_table(COLUMNS, [row.cells for row in rows]),
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--names", default=",".join(NAMES), help="Architectures, separated by commas.")
@click.option("--seeds", default=5, help="Plans on each mesh.")
@click.option("--first", default=0, help="The first seed on each mesh.")
@click.option("--meshes", default="; ".join(MESHES), help="Meshes, separated by semicolons.")
@click.option("--dtypes", default="", help="Element types; by default the widest of each model.")
@click.option("--dropout", default=0.0, help="Probability of dropping, where a model drops.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(names: str, seeds: int, first: int, meshes: str, dtypes: str, dropout: float, path: Path | None) -> None:
    """Print a row per architecture; exit 1 if any plan fails."""
    console = Console()
    drawn = [Mesh.parse(text.strip()) for text in meshes.split(";")]
    types = [getattr(torch, name) for name in dtypes.split(",")] if dtypes else [None]
    rows, drawn_seeds = [], range(first, first + seeds)
    for name in track(names.split(","), description="architectures", console=console):
        for dtype in types:
            rows.append(measure(name, drawn, drawn_seeds, dtype, dropout))
            console.print("  ".join(rows[-1].cells))
    lone, count = sum(row.lone for row in rows), sum(len(row.reports) for row in rows)
    console.print(f"in {lone} of {count} plans single ranks run some ops alone")
    if path is not None:
        path.write_text(markdown(rows, drawn_seeds, meshes, dtypes, dropout))
    sys.exit(0 if all(r.passed for row in rows for r in row.reports) else 1)


if __name__ == "__main__":
    main()
