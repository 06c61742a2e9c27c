"""Parity of plans with pipeline stages, drawn at random, with one device.

    OMP_NUM_THREADS=1 python benchmarks/parity/pipeline_parity.py --markdown benchmarks/results/pipeline_parity.md

The schedule is drawn, the cuts (between any two ops), and everything that benchmarks/parity/parity.py draws. All
ranks are simulated in one process, micro-batches in the order of torch's own schedule.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from autopar.ir import SCHEDULES, Mesh, Plan
from autopar.proof.random_plan import random_plan
from autopar.proof.subject import Subject

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.parity.parity import COLUMNS, Row
from benchmarks.tables import markdown_table
from benchmarks.zoo.models import NAMES, build

MESHES = ("pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2")


def measure(name: str, plans: int, seeds: Iterator[int]) -> tuple[Row, list[str]]:
    """Draws and compares `plans` plans on every mesh, each with the next seed; also their schedules."""
    start_seconds = time.perf_counter()
    subject = Subject.of(*build(name))
    drawn = [draw(subject, Mesh.parse(text), next(seeds)) for text in MESHES for _ in range(plans)]
    reports = tuple(subject.compare(plan) for plan in drawn)
    schedules = [plan.pipeline.schedule for plan in drawn if plan.pipeline is not None]
    seconds, draws = time.perf_counter() - start_seconds, len(subject.streams.ops)
    return Row(name, reports, lone=0, seconds=seconds, draws=draws), schedules


def draw(subject: Subject, mesh: Mesh, seed: int) -> Plan:
    graph, fingerprint = subject.prepared.analysis.graph, subject.prepared.captured.fingerprint
    return random_plan(graph, mesh, seed=seed, fingerprint=fingerprint)


def markdown(rows: list[Row], passed: Counter[str], drawn: Counter[str], plans: int, first: int) -> str:
    """The tables as a page."""
    lines = [
        "# Parity of random plans with pipeline stages",
        "",
        f"{plans} plans drawn at random on each of the meshes {'; '.join(MESHES)}: schedule, cuts at any op,",
        "layouts, storage. All ranks simulated in one process, in the order of torch's schedule, against the eager",
        "model on one device; relative errors, the worst of all plans and ranks. Made by",
        f"`OMP_NUM_THREADS=1 python benchmarks/parity/pipeline_parity.py --plans {plans} --first {first} "
        "--markdown benchmarks/results/pipeline_parity.md`.",
        "",
        *markdown_table(COLUMNS, [row.cells for row in rows]),
        "",
        *markdown_table(
            ("schedule", "plans passed"), [(f"`{name}`", f"{passed[name]} of {drawn[name]}") for name in SCHEDULES]
        ),
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--names", default=",".join(NAMES), help="Architectures, separated by commas.")
@click.option("--plans", default=2, help="Plans on each mesh.")
@click.option("--first", default=0, help="The seed of the first plan; each next plan has the next.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the tables there.")
def main(names: str, plans: int, first: int, path: Path | None) -> None:
    """Print a row per architecture; exit 1 if any plan fails."""
    console, seeds = Console(), itertools.count(first)
    rows, passed, drawn = list[Row](), Counter[str](), Counter[str]()
    for name in track(names.split(","), description="architectures", console=console):
        row, schedules = measure(name, plans, seeds)
        rows.append(row)
        drawn.update(schedules)
        passed.update(s for s, r in zip(schedules, row.reports, strict=True) if r.passed)
        console.print("  ".join(row.cells))
    if path is not None:
        path.write_text(markdown(rows, passed, drawn, plans, first))
    sys.exit(0 if passed == drawn else 1)


if __name__ == "__main__":
    main()
