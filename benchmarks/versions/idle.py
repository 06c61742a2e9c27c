"""How long ranks of a pipeline wait while it is full: schedules without a flush, and 1F1B with one, in one run.

    OMP_NUM_THREADS=1 python -m benchmarks.versions.idle

Four Gloo ranks share the cores of one machine, so that a rank would wait for a core, too. Hence ranks are paced: a
forward ends `--forward-ms` after it began, and a backward with the update behind it twice as long after, while the
rank sleeps. So every rank computes as if on a device of its own. What it does between its actions (messages, Python,
the wait for a neighbour) counts as idle time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
import torch.distributed as dist

import autopar
from autopar.ir import VERSIONED, Pipeline
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.runtime.pipeline.pipeline import BoundStage
from benchmarks.delayed import optimizer_of, random_batches
from benchmarks.tables import markdown_table
from benchmarks.versions.run import loss_fn, small_model
from tests.runtime.gloo_ranks import Ranks

GROUPS = 8  # a run has so many times as many micro-batches as ranks


class Case(NamedTuple):
    """A schedule, and the number of micro-batches of an update; with a flush that is a step."""

    schedule: str
    update: int

    @classmethod
    def all_of(cls, ranks: int) -> Iterator[Case]:
        """Every schedule without a flush, after one with a flush at every update (1F1B takes no single micro-batch)."""
        yield cls("gpipe", 1)
        yield from (cls(name, 1) for name in VERSIONED[:2])
        yield cls("1f1b", ranks)
        yield from (cls(name, ranks) for name in VERSIONED[2:])

    @property
    def flushes(self) -> bool:
        return self.schedule not in VERSIONED

    def micro_batches(self, ranks: int) -> int:
        """Number of micro-batches in a step."""
        return self.update if self.flushes else GROUPS * ranks


class Busy(NamedTuple):
    """An action of a rank: its kind, and when it began and ended, by one clock of all ranks."""

    kind: str
    begin: float
    end: float


class Pace:
    """Lets the actions of this rank's stages take a given time, and keeps when they ran.

    Args:
        forward_seconds: duration of a forward; a backward with its update takes twice as long.
    """

    def __init__(self, forward_seconds: float) -> None:
        self._seconds = {"F": forward_seconds, "B": 2 * forward_seconds}
        self.spans: list[Busy] = []
        self._begun = 0.0

    def end(self, kind: str, begun: float) -> None:
        """Ends an action when its time is over."""
        time.sleep(max(0.0, begun + self._seconds[kind] - time.monotonic()))
        self.spans.append(Busy(kind, begun, time.monotonic()))

    def taking_part(self) -> Any:
        """A context in which the actions of pipelines take their time."""
        names = ("forward", "begin_backward", "end_backward")
        run, begin, end = (getattr(BoundStage, name) for name in names)

        def forward(stage: BoundStage, *args: Any) -> Any:
            begun = time.monotonic()
            found = run(stage, *args)
            self.end("F", begun)
            return found

        def before(stage: BoundStage, *args: Any, **options: Any) -> None:
            self._begun = time.monotonic()
            begin(stage, *args, **options)

        def after(stage: BoundStage, *args: Any) -> None:
            end(stage, *args)
            self.end("B", self._begun)

        patches = dict(zip(names, (forward, before, after), strict=True))
        return mock.patch.multiple(BoundStage, **patches)


def busy(case: Case, forward_seconds: float) -> list[list[Busy]]:
    """When this rank was busy, for every step after the first, which warms up."""
    ranks = dist.get_world_size()
    count = case.micro_batches(ranks)
    batch = random_batches(count)[0]
    model = autopar.compile(
        small_model(),
        loss_fn=loss_fn,
        mesh={"pp": ranks},
        recipe=case.schedule,
        micro_batches=count,
        example_inputs=batch,
    )
    optimizer = optimizer_of("sgd", model)
    if not case.flushes:
        model.attach_optimizer(optimizer)
    pace, steps = Pace(forward_seconds), list[list[Busy]]()
    with pace.taking_part():
        for _ in range(2 + GROUPS * ranks // count):
            pace.spans = []
            model.step(*batch)
            optimizer.step()  # without a flush it finds no gradients
            optimizer.zero_grad()
            steps.append(pace.spans)
    return steps[1:]


def idle_shares(ranks: list[list[list[Busy]]], case: Case) -> list[float]:
    """The share of the time in which the pipeline is full that each rank waits.

    With a flush the pipeline is never full for long: the time is that of whole steps, and the last step ends it.
    """
    steps = ranks[0]
    begin = min(s.begin for s in steps[0] if case.flushes or s.kind == "B")
    end = steps[-1][0].begin if case.flushes else max(s.end for s in steps[0] if s.kind == "F")
    return [1 - _overlap(own, begin, end) / (end - begin) for own in ranks]


def _overlap(steps: list[list[Busy]], begin: float, end: float) -> float:
    spans = (span for step in steps for span in step)
    return sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for s in spans)


def full_seconds(run: Simulation) -> tuple[float, float]:
    """Begin and end of the time during which a pipeline is full.

    It begins with the first backward of the first rank, and ends with the last forward of the first rank.
    """
    first = [span for span in run.spans if span.rank == 0]
    begin = min(span.begin_seconds for span in first if span.kind in "BI")
    return begin, max(span.end_seconds for span in first if span.kind == "F")


def idle_seconds(run: Simulation, begin: float, end: float) -> tuple[float, ...]:
    """Seconds between two times in which each rank does not compute."""
    idle = [end - begin] * run.ranks
    for span in run.spans:
        if len(span.kind) == 1:
            idle[span.rank] -= max(0.0, min(span.end_seconds, end) - max(span.begin_seconds, begin))
    return tuple(idle)


def simulated_share(case: Case, ranks: int) -> float:
    """The same of the simulated schedule, where a forward takes 1, and a backward with its update 2."""
    pipeline = Pipeline(ranks, case.schedule, tuple(f"op{i}" for i in range(1, ranks)))
    found = simulate(actions(pipeline, case.micro_batches(ranks)), [StageCosts(1.0, 2.0)] * ranks)
    if case.flushes:
        return found.bubble_fraction
    begin, end = full_seconds(found)
    return max(idle_seconds(found, begin, end)) / (end - begin)


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=4, help="Number of ranks, each a stage.")
@click.option("--forward-ms", default=60.0, help="Duration of a forward in milliseconds.")
def main(ranks: int, forward_ms: float) -> None:
    """Prints the table of benchmarks/results/versions.md."""
    processes, rows = Ranks(ranks), []
    for case in Case.all_of(ranks):
        found = processes.run(busy, case, forward_ms / 1e3)
        shares = idle_shares(found, case)
        columns = (simulated_share(case, ranks), sum(shares) / ranks, max(shares))
        name = f"`{case.schedule}`" + (", with a flush" if case.flushes else "")
        rows.append((name, str(case.update), *(f"{100 * x:.1f}" for x in columns)))
    processes.stop()
    heads = (
        "schedule",
        "micro-batches an update",
        "idle, simulated, %",
        "measured, mean of the ranks, %",
        "measured, the most of a rank, %",
    )
    print("\n".join(markdown_table(heads, rows, text_columns=1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
