"""Kills training at random moments and starts it again from its last checkpoint.

    OMP_NUM_THREADS=1 python -m benchmarks.faults.run --runs 54 --markdown benchmarks/results/faults.md

In every run a rank dies or cannot write, the others have to end by themselves within `BOUND_SECONDS`, and all ranks
start again, in a third of the runs half of them. A run is good if no rank hangs, no checkpoint that was complete is
lost, and every loss is that of an undisturbed run of one process.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import get_args

import click
import torch.distributed as dist

from benchmarks.faults.accidents import Accident, Place
from benchmarks.faults.training import EVERY, PLANS, STEPS, TIMEOUT_SECONDS, undisturbed, work
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table
from tests.runtime.gloo_ranks import CONTEXT

START_SECONDS = 200.0  # for an attempt, until the first rank has ended
BOUND_SECONDS = 45.0  # from then until the last has
TOLERANCE = 1e-8  # relative; the largest difference of a loss in float64
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Fault:
    """What one run suffers.

    Attributes:
        number: number of the run, from which everything else is drawn.
        plan: one of `PLANS`.
        place: one of `PLACES`.
        ranks: number of ranks at first.
        after: number of ranks after the accident.
    """

    number: int
    plan: str
    place: Place
    ranks: int
    after: int

    @classmethod
    def drawn(cls, number: int, ranks: int = 4) -> Fault:
        """The fault of a run: 18 in a row meet every plan and every place, and every third 18 go on with half."""
        cases = list(itertools.product(PLACES, PLANS))
        place, plan = cases[number % len(cases)]
        count = 4 if plan.startswith("pp") else ranks
        halved = (number // len(cases)) % 3 == 1
        return cls(number, plan, place, count, count // 2 if halved else count)

    def attempts(self) -> Iterator[tuple[int, Accident | None]]:
        """The number of ranks and the accident of every attempt, the last without one."""
        draw = random.Random(self.number)
        signal = draw.choice(["SIGKILL", "SIGTERM"])
        # Two checkpoints are complete by then, and the last save is to come.
        saves = range(3 * EVERY, STEPS, EVERY)
        in_save = self.place in ("saving", "full disk")
        step = draw.choice(saves) if in_save else draw.randrange(3 * EVERY + 1, STEPS)
        moment = draw.random()
        first: Place = "in a step" if self.place in ("loading", "truncated file") else self.place
        yield (self.ranks, Accident(first, signal, draw.randrange(self.ranks), self.ranks, step, moment))
        if self.place == "loading":
            yield (self.after, Accident("loading", signal, draw.randrange(self.after), self.after, 0, 0.0))
        yield self.after, None


@dataclass(frozen=True)
class Result:
    """What became of one run.

    Attributes:
        name: the run's number, plan, place, and numbers of ranks.
        plan: its plan.
        place: where the accident happened.
        halved: whether it went on with half of the ranks.
        hung: whether a rank hung.
        lost: whether a complete checkpoint was lost.
        gap: largest relative difference of a loss from that of an undisturbed run.
        end_seconds: duration from the end of the first rank to that of the last, the longest of all accidents.
        cpu_seconds: processor time of the ranks that were not killed.
        problem: what is wrong, in words; "" for a good run.
    """

    name: str
    plan: str
    place: str
    halved: bool
    hung: bool
    lost: bool
    gap: float
    end_seconds: float
    cpu_seconds: float
    problem: str


def met(fault: Fault) -> Result:
    """Runs a fault and looks at what became of it."""
    with tempfile.TemporaryDirectory() as name:
        folder, problems, took_seconds = Path(name), list[str](), 0.0
        hung = lost = False
        for number, (count, accident) in enumerate(fault.attempts()):
            expected = _newest(folder)
            seconds, codes = _attempt(folder, count, fault.plan, accident)
            took_seconds = max(took_seconds, seconds if accident else 0.0)
            hung |= None in codes
            problems += _wrong_codes(codes, accident)
            problems += _wrong_start(folder, number, expected, accident)
            lost |= (_newest(folder) or 0) < _last(folder, "saved")
            if fault.place == "truncated file" and accident is not None:
                _truncate(folder, random.Random(fault.number))
        spent = sum(float(file.read_text()) for file in folder.glob("spent*"))
        gap = _gap(folder)
    if not gap <= TOLERANCE:
        problems.append(f"a loss differs by {gap:.1e}")
    lost |= any("resumed" in each for each in problems)
    after = f" then {fault.after}" if fault.after != fault.ranks else ""
    return Result(
        f"{fault.number}: {fault.plan}, {fault.place}, {fault.ranks}{after} ranks",
        fault.plan,
        fault.place,
        fault.after != fault.ranks,
        hung,
        lost,
        gap,
        took_seconds,
        spent,
        "; ".join(problems),
    )


def _attempt(folder: Path, count: int, plan: str, accident: Accident | None) -> tuple[float, list[int | None]]:
    """Runs all ranks; the seconds from the first end to the last, and exit codes, None for a rank that hung."""
    # As torchrun's agent does, this process holds the store: it outlives every rank.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    args = (count, str(folder), store.port, plan, accident)
    processes = [CONTEXT.Process(target=work, args=(rank, *args)) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        wait([process.sentinel for process in processes], START_SECONDS)
        begin_seconds = time.monotonic()
        for process in processes:
            process.join(max(0.0, begin_seconds + BOUND_SECONDS - time.monotonic()))
        return time.monotonic() - begin_seconds, [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _wrong_codes(codes: list[int | None], accident: Accident | None) -> list[str]:
    """What is wrong with the ends of the ranks: a killed one has its signal, the others an error of ours or none."""
    if accident is None:
        return [] if set(codes) == {0} else [f"the last attempt ended with {codes}"]
    killed = [code for code in codes if code is not None and code < 0]
    is_full = accident.place == "full disk"
    others = [code for code in codes if code not in killed]
    if len(killed) != (0 if is_full else 1) or not set(others) <= {3}:
        return [f"an attempt with an accident {accident.place} ended with {codes}"]
    return []


def _wrong_start(folder: Path, number: int, expected: int | None, accident: Accident | None) -> list[str]:
    """What is wrong with the checkpoint that an attempt went on from."""
    begun = [line for line in _lines(folder) if line.startswith("resumed")]
    if accident is not None and accident.place == "loading":
        return [f"attempt {number} resumed from a checkpoint that it was to die in"] * (len(begun) != number)
    found = int(begun[-1].split()[1])
    return [] if found == (expected or 0) else [f"attempt {number} resumed {found}, not {expected}"]


def _lines(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def _last(folder: Path, what: str) -> int:
    """The highest step that the log names so; 0 if it names none."""
    return max((int(line.split()[1]) for line in _lines(folder) if line.startswith(what)), default=0)


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints that are not damaged, the newest last."""
    found = (folder / "checkpoints").glob("step-*")
    return sorted(p for p in found if re.fullmatch(r"step-\d+", p.name) and not (p / "truncated").exists())


def _newest(folder: Path) -> int | None:
    """The step of the newest checkpoint."""
    return max((int(p.name.removeprefix("step-")) for p in _checkpoints(folder)), default=None)


def _truncate(folder: Path, draw: random.Random) -> None:
    """Cuts a file of the newest checkpoint at a random byte, and marks the folder for ourselves."""
    newest = _checkpoints(folder)[-1]
    file = draw.choice(sorted(newest.iterdir()))
    os.truncate(file, draw.randrange(file.stat().st_size))
    (newest / "truncated").touch()


def _gap(folder: Path) -> float:
    """The largest relative difference of a loss, those of repeated steps included; infinite where one is missing."""
    expected, gap = undisturbed(), 0.0
    losses = [line.split()[1:] for line in _lines(folder) if line.startswith("loss")]
    for step, loss in losses:
        wanted = expected[int(step) - 1]
        gap = max(gap, abs(float(loss) - wanted) / wanted)
    return gap if {int(step) for step, _ in losses} == {*range(1, STEPS + 1)} else float("inf")


def table(results: list[Result]) -> list[str]:
    """A row for every plan and place: runs, and how they ended."""
    rows = []
    for place, plan in itertools.product(PLACES, PLANS):
        own = [r for r in results if (r.place, r.plan) == (place, plan)]
        if own:
            rows.append(
                (
                    place,
                    plan,
                    str(len(own)),
                    str(sum(r.halved for r in own)),
                    str(sum(r.hung for r in own)),
                    str(sum(r.lost for r in own)),
                    f"{max(r.gap for r in own):.0e}",
                    f"{max(r.end_seconds for r in own):.1f}",
                    str(sum(not r.problem for r in own)),
                )
            )
    heads = (
        "accident",
        "plan",
        "runs",
        "of them halved",
        "hangs",
        "lost checkpoints",
        "largest difference of a loss",
        "seconds to the last end",
        "good",
    )
    return markdown_table(heads, rows, text_columns=2)


PAGE = """# Faults

Training that is killed at random moments and starts again: {runs} runs, {good} of them good, {hung} hangs, {lost} lost
checkpoints. The table is what

    OMP_NUM_THREADS=1 python -m benchmarks.faults.run --runs {runs} --markdown benchmarks/results/faults.md

gives. The model is an MLP in float64 on Gloo ranks of one machine, {steps} steps with a checkpoint every {every}, on
four ranks and after the accident on four again or, where it says halved, on two. The step, the moment within it and the
rank are drawn for each run.

| accident | |
|---|---|
| in a step | SIGKILL or SIGTERM at a random moment of a step: in forward, backward, or the optimizer |
| in a collective | the same while the rank waits in a collective for another rank, which is late |
| saving | the same before the rank writes its file, before it syncs it, or before the first rank names the checkpoint |
| loading | the same when the rank begins to read tensors, in the attempt after an accident in a step |
| full disk | the kernel lets no file of a rank grow (RLIMIT_FSIZE); nobody is killed, and the next save raises it |
| truncated file | after an accident in a step a file of the newest checkpoint is cut at a random byte |

The ranks that are left end by themselves, with a `PeerError`, or an `AutoparError` for the full disk: nobody ends
them, as torchrun would. A rank waits {timeout:g} s at most for another, and a run hangs if a rank has not ended
{bound:g} s after the first. A run goes on from the newest complete checkpoint, or from the one before if a file of it
was cut. Losses are compared with those of one process without autopar, also those of repeated steps.
{remark}
"""


def page(results: list[Result], remark: str = "") -> str:
    """The page of the documentation."""
    head = PAGE.format(
        runs=len(results),
        good=sum(not r.problem for r in results),
        hung=sum(r.hung for r in results),
        lost=sum(r.lost for r in results),
        steps=STEPS,
        every=EVERY,
        timeout=TIMEOUT_SECONDS,
        bound=BOUND_SECONDS,
        remark=remark and remark + "\n",
    )
    bad = [f"- {r.name}: {r.problem}" for r in results if r.problem]
    return head + "\n".join([*table(results), *(["", *bad] if bad else [])]) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--runs", default=54, help="Number of runs.")
@click.option("--results", default="runs/faults.jsonl", type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path), help="Page to write.")
@click.option("--remark", default="", help="A sentence for the page, such as the load of the machine.")
def main(runs: int, results: Path, markdown: Path | None, remark: str) -> None:
    """Run faults that have no result yet, and write the table."""
    for number in range(runs):
        known = {int(name.partition(":")[0]) for name in stored(results, Result)}
        if number in known:
            continue
        result = met(Fault.drawn(number))
        store(results, result)
        print(f"{result.name}: {result.problem or 'good'} ({result.end_seconds:.1f} s)", flush=True)
    found = list(stored(results, Result).values())
    print("\n".join(table(found)))
    if markdown is not None:
        markdown.write_text(page(found, remark))


if __name__ == "__main__":
    main()
