"""Parity of plans with one device over the architectures of `transformers`, as many as time allows.

    OMP_NUM_THREADS=1 python benchmarks/zoo.py --results /tmp/zoo.jsonl --markdown docs/zoo.md

Each is built small (zoo_small.py), captured, and six plans of it are simulated and compared. It runs in a
process of its own, forked from this one, with a bound on time and memory. Results are lines of JSON, and
an interrupted run goes on where it stopped. The order is drawn at random once, so that the first hundred
are a fair sample of all.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from autopar.cost_model import find_hardware
from autopar.errors import CaptureError
from autopar.ir import Mesh, Plan
from autopar.planning import make_plan
from autopar.random_plan import random_plan
from autopar.verify import Subject

sys.path.insert(0, str(Path(__file__).parent))
from zoo_small import make

# name -> (mesh, recipe, micro-batches)
SEARCHED: Mapping[str, tuple[dict[str, int], str, int]] = {
    "dp=2": ({"dp": 2}, "ddp", 1),
    "tp=2": ({"tp": 2}, "tp", 1),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, "dp:ddp,tp:tp", 1),
    "zero3": ({"dp": 2}, "zero3", 1),
    "pp=2": ({"pp": 2}, "auto", 4),
}
RANDOM = "random"
PLANS = (*SEARCHED, RANDOM)
PASSED = "passed"
ORDER_SEED = 0


@dataclass
class Row:
    """What came of one architecture.

    Attributes:
        name: its model type.
        model: class and inputs.
        kind: text, vision, audio.
        dtype: of weights.
        parameters: how many numbers.
        stopped: why it was not built or captured, "" if it was.
        stage: what was being done last: build, capture, a plan, or done.
        plans: `passed` or why not.
        worst: the largest error of all plans relative to its tolerance.
        seconds: of everything.
    """

    name: str
    model: str = ""
    kind: str = ""
    dtype: str = ""
    parameters: int = 0
    stopped: str = ""
    stage: str = "build"
    plans: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    seconds: float = 0.0

    @property
    def captured(self) -> bool:
        return not self.stopped and self.stage not in ("build", "capture")

    @property
    def passed(self) -> bool:
        return self.captured and all(self.plans.get(plan) == PASSED for plan in PLANS)


def architectures() -> list[str]:
    """All model types with a model, in an order drawn at random, the same each time."""
    from transformers.models.auto import modeling_auto

    names = sorted(modeling_auto.MODEL_MAPPING_NAMES)
    random.Random(ORDER_SEED).shuffle(names)
    return names


def examine(name: str, progress: Callable[[Row], None]) -> Row:
    """Builds, captures and compares one architecture; `progress` is told of every step."""
    row = Row(name)
    try:
        small = make(name)
        row.model, row.kind, row.parameters = small.description, small.kind, small.parameters
        row.dtype = str(next(small.step.model.parameters()).dtype).removeprefix("torch.")
        row.stage = "capture"
        progress(row)
        subject = Subject.of(small.step, small.args)
    except Exception as error:
        # Whatever fails after export is autopar's: it counts as captured.
        if row.stage == "build" or isinstance(error, CaptureError):
            row.stopped = one_line(error)
            return row
        row.plans = {"analysis": one_line(error)}
        row.stage = "done"
        return row
    for plan in PLANS:
        row.stage = plan
        progress(row)
        row.plans[plan] = _outcome(subject, plan, row)
    row.stage = "done"
    return row


def _outcome(subject: Subject, name: str, row: Row) -> str:
    try:
        report = subject.compare(_plan(subject, name))
    except Exception as error:
        return one_line(error)
    errors = (report.loss_error, report.worst_gradient_error, report.buffer_error)
    row.worst = max(row.worst, max(errors) / report.tolerance)
    if report.passed:
        return PASSED
    return (
        f"loss error {report.loss_error:.1e}, gradient error {report.worst_gradient_error:.1e} at "
        f"{report.worst_parameter}, buffer error {report.buffer_error:.1e}"
    )


def _plan(subject: Subject, name: str) -> Plan:
    prepared = subject.prepared
    if name == RANDOM:
        graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
        return random_plan(graph, Mesh.of({"a": 2}), seed=0, fingerprint=fingerprint)
    mesh, recipe, micro_batches = SEARCHED[name]
    return make_plan(
        prepared, mesh, hardware=find_hardware("cpu-gloo"), recipe=recipe,
        memory_bytes=sys.maxsize, micro_batches=micro_batches,
    )  # fmt: skip


def one_line(error: BaseException) -> str:
    """Type and first lines of an error, with the place of one that is not meant for people."""
    words = " ".join(str(error).split())
    if isinstance(error, CaptureError):
        return words[:300]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f" ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}: {words[:240]}{place}"


def in_process(name: str, seconds: float, memory_bytes: int, scratch: Path) -> Row:
    """`examine` in a child; one that takes too long is ended, and the row says where it stood."""
    start_seconds = time.perf_counter()
    scratch.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(name, memory_bytes, scratch)
    status = _wait(child, start_seconds + seconds)
    row = Row(**json.loads(scratch.read_text())) if scratch.exists() else Row(name)
    if status != 0:
        reason = f"took over {seconds:.0f} s" if status is None else f"ended with status {status}"
        if row.stage in ("build", "capture"):
            row.stopped = f"{row.stage} {reason}"
        else:
            row.plans[row.stage] = reason
    row.seconds = time.perf_counter() - start_seconds
    return row


def _child(name: str, memory_bytes: int, scratch: Path) -> None:
    """Never returns."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    code = 1
    try:
        _write(examine(name, lambda row: _write(row, scratch)), scratch)
        code = 0
    finally:
        os._exit(code)


def _write(row: Row, path: Path) -> None:
    """In one move, so that a child ended while it writes leaves the row before."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(row)))
    beside.replace(path)


def _wait(child: int, until_seconds: float) -> int | None:
    """Exit status, None for one that was ended because its time was over."""
    while time.perf_counter() < until_seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def read(path: Path) -> dict[str, Row]:
    """The rows so far; of an architecture examined twice the last counts."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return {row.name: row for row in rows}


CAUSES: tuple[tuple[str, str], ...] = ()  # (part of an error, what lies behind it)


def markdown(rows: Sequence[Row], tried_of: int) -> str:
    """The page."""
    captured = [row for row in rows if row.captured]
    passed = [row for row in captured if row.passed]
    built = [row for row in rows if row.model]
    kinds = Counter(row.kind for row in built)
    each = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    plans = ", ".join(
        f"{plan} {sum(row.plans.get(plan) == PASSED for row in captured)}" for plan in PLANS
    )
    return "\n".join(
        [
            "# The zoo",
            "",
            "Architectures of `transformers`, each built small from its configuration (no download), captured, and",
            "compared with the eager model on one device under six plans, all ranks simulated: loss, every gradient,",
            "every updated buffer. Five plans are searched with a recipe (ddp, tp, ddp x tp, zero3, stages with four",
            "micro-batches), one is drawn at random on an axis of two. Made by",
            "`OMP_NUM_THREADS=1 python benchmarks/zoo.py --results RESULTS.jsonl --markdown docs/zoo.md`,",
            f"in an order drawn at random: these {len(rows)} are a sample of the {tried_of} that `transformers` has.",
            "",
            f"- tried: {len(rows)}",
            f"- built and run eagerly: {len(built)} ({each})",
            f"- captured: {len(captured)}",
            f"- passed all six plans: {len(passed)} of {len(captured)} "
            f"({100 * len(passed) / max(len(captured), 1):.0f} %)",
            f"- passed by plan: {plans}",
            "",
            "`worst` is the largest error relative to its tolerance (1e-9 in float64, 2e-5 where any part of the",
            "graph is of lower precision).",
            "",
            "## Captured",
            "",
            "| architecture | model and inputs | kind | dtype | parameters | " + " | ".join(PLANS) + " | worst |",
            "|" + "---|" * (len(PLANS) + 6),
            *(_line(row) for row in sorted(captured, key=lambda r: r.name)),
            "",
            "## Failures",
            "",
            *_failures(captured),
            "",
            "## Not captured",
            "",
            "Where no inputs run, the error is that of the generic small configuration or inputs, not of autopar.",
            "",
            *(
                f"- **{row.name}** ({row.model or 'not built'}): {_plain(row.stopped)}"
                for row in sorted(rows, key=lambda r: (not r.model, r.name))
                if not row.captured
            ),
        ]
    ) + "\n"  # fmt: skip


def _line(row: Row) -> str:
    cells = ["yes" if row.plans.get(plan) == PASSED else "**no**" for plan in PLANS]
    return (
        f"| {row.name} | `{row.model}` | {row.kind} | {row.dtype} | {row.parameters:,} | "
        f"{' | '.join(cells)} | {row.worst:.0e} |"
    )


def _failures(captured: Sequence[Row]) -> list[str]:
    """Each failing plan in a line, those of one cause together."""
    lines = []
    for row in sorted(captured, key=lambda r: r.name):
        reasons: dict[str, list[str]] = {}
        for plan, outcome in row.plans.items():
            if outcome != PASSED:
                reasons.setdefault(outcome, []).append(plan)
        lines += [
            f"- **{row.name}**, {', '.join(plans)}: {_plain(reason)}"
            for reason, plans in reasons.items()
        ]
    return lines or ["None."]


def _plain(text: str) -> str:
    """Without the paths of this machine, and on one line."""
    here = str(Path(torch.__file__).parents[1])
    return text.replace(here + "/", "").replace("|", "\\|")


@click.command(context_settings={"show_default": True})
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Lines of JSON.")
@click.option("--only", default="", help="Architectures, separated by commas; all by default.")
@click.option("--count", default=0, help="The first so many of the order; 0 for all.")
@click.option("--again", is_flag=True, help="Examine those that have a result too.")
@click.option("--seconds", default=120.0, help="Bound on the time of one architecture.")
@click.option("--memory-gb", default=8.0, help="Bound on the memory of one.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page there.")
def main(
    results: Path, only: str, count: int, again: bool, seconds: float, memory_gb: float,
    path: Path | None,
) -> None:  # fmt: skip
    """Print a line per architecture; exit 1 if under 85 % of those captured pass."""
    console, known = Console(), architectures()
    names = only.split(",") if only else known[: count or None]
    done = {} if again else read(results)
    left = [name for name in names if name not in done]
    for name in track(left, description="architectures", console=console):
        row = in_process(name, seconds, int(memory_gb * 1e9), results.with_suffix(".partial"))
        with results.open("a") as lines:
            lines.write(json.dumps(asdict(row)) + "\n")
        console.print(_summary(row), highlight=False)
    rows = [row for row in read(results).values() if row.name in known]
    if path is not None:
        path.write_text(markdown(rows, len(known)))
    captured = [row for row in rows if row.captured]
    sys.exit(0 if sum(row.passed for row in captured) >= 0.85 * len(captured) else 1)


def _summary(row: Row) -> str:
    failed = {plan: text for plan, text in row.plans.items() if text != PASSED}
    state = row.stopped or ("passed" if row.passed else str(failed))
    return f"{row.name} {row.seconds:.0f} s: {state}"


if __name__ == "__main__":
    main()
