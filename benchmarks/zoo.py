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
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

from autopar.cost_model import find_hardware
from autopar.errors import CaptureError
from autopar.ir import Mesh, Plan
from autopar.planning import make_plan
from autopar.random_plan import random_plan
from autopar.verify import TOLERANCE_FLOAT64, Subject, tolerance

sys.path.insert(0, str(Path(__file__).parent))
from zoo_small import Small, make

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
BEYOND = "beyond the tolerance"
WIDE = "passed with float64 in place of float32"
ORDER_SEED = 0
OVER_TIME = (signal.SIGXCPU, signal.SIGKILL)  # what the system ends a child with


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
        return self.captured and all(self.plans.get(plan) in (PASSED, WIDE) for plan in PLANS)


def architectures() -> list[str]:
    """All model types with a model, in an order drawn at random, the same each time."""
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
        if row.plans[plan].startswith(BEYOND):
            row.plans[plan] = _second_look(small, plan) or row.plans[plan]
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
        f"{BEYOND}: loss error {report.loss_error:.1e}, gradient error "
        f"{report.worst_gradient_error:.1e} at {report.worst_parameter}, buffer error {report.buffer_error:.1e}"
    )


class Widening(TorchFunctionMode):
    """float64 wherever a model's code asks for float32: what is left of an error is no rounding."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)


def _second_look(small: Small, plan: str) -> str:
    """The outcome without float32, "" where that is not better or cannot be."""
    again = Row(small.description)
    try:
        with Widening():
            subject = Subject.of(small.step, small.args)
            outcome = _outcome(subject, plan, again)
    except Exception:  # an op that takes no float64: the first outcome stands
        return ""
    return WIDE if outcome == PASSED and tolerance(subject.prepared) == TOLERANCE_FLOAT64 else ""


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
    """`examine` in a child; one that takes too long is ended, and the row says where it stood.

    The bound is on processor time, which a busy machine does not use up; four times that of the clock.
    """
    start_seconds = time.perf_counter()
    scratch.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(name, int(seconds), memory_bytes, scratch)
    status = _wait(child, start_seconds + 4 * seconds)
    row = Row(**json.loads(scratch.read_text())) if scratch.exists() else Row(name)
    if status != 0:
        late = status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in OVER_TIME)
        reason = f"took over {seconds:.0f} s" if late else f"ended with status {status}"
        if row.stage in ("build", "capture"):
            row.stopped = f"{row.stage} {reason}"
        else:
            row.plans[row.stage] = reason
    row.seconds = time.perf_counter() - start_seconds
    return row


def _child(name: str, seconds: int, memory_bytes: int, scratch: Path) -> None:
    """Never returns."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # default ids lie outside a small vocabulary
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
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


# (part of an error, what lies behind it); the first that matches counts.
CAUSES = (
    (
        "there is nothing to compare",
        "random numbers in evaluation too: no reference to compare with",
    ),
    ("data-dependent", "Python control flow or a shape that depends on a tensor's value"),
    ("of a tensor's value", "a Python number or a size read off a tensor's value"),
    ("cannot be captured", "other code that export refuses"),
    ("requires the", "a package that is not installed (timm)"),
    ("took over", "over the bound on time"),
    ("ended with status", "over the bound on memory, or the process ended"),
    ("no inputs run", "the generic inputs are not what the model wants"),
    ("", "the generic configuration is not one that the model's class takes"),
)


def markdown(rows: Sequence[Row], tried_of: int, note: str = "") -> str:
    """The page; `note` says what is particular to this run."""
    captured = [row for row in rows if row.captured]
    passed = [row for row in captured if row.passed]
    wide = [row for row in passed if WIDE in row.plans.values()]
    built = [row for row in rows if row.model]
    kinds = Counter(row.kind for row in built)
    each = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    plans = ", ".join(
        f"{plan} {sum(row.plans.get(plan) in (PASSED, WIDE) for row in captured)}" for plan in PLANS
    )
    return "\n".join(
        [
            "# The zoo",
            "",
            "Architectures of `transformers`, each built small from its configuration (no download), captured, and",
            "compared with the eager model on one device under six plans, all ranks simulated: loss, every gradient,",
            "every updated buffer. Five plans are searched with a recipe (ddp, tp, ddp x tp, zero3, stages with four",
            "micro-batches), one is drawn at random on an axis of two. Made by",
            "`OMP_NUM_THREADS=1 python benchmarks/zoo.py --results RESULTS.jsonl "
            f"--count {len(rows)} --markdown docs/zoo.md`,",
            f"in an order drawn at random: {len(rows)} of the {tried_of} that `transformers` has. {note}",
            "",
            f"- tried: {len(rows)}",
            f"- built and run eagerly: {len(built)} ({each})",
            f"- captured: {len(captured)}",
            f"- passed all six plans: {len(passed)} of {len(captured)} "
            f"({100 * len(passed) / max(len(captured), 1):.0f} %), {len(wide)} of them only with float64 "
            "in place of float32 (below)",
            f"- passed by plan: {plans}",
            "",
            "`worst` is the largest error relative to its tolerance (1e-9 in float64, 2e-5 where any part of",
            "the graph is of lower precision). Where float32 inside a model's code brings an error beyond that,",
            "the plan is proved again with float64 in its place: `float64` in the table says that it then passed",
            "at 1e-9, that is, that the error was rounding.",
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
            "| cause | architectures |",
            "|---|---|",
            *(f"| {cause} | {count} |" for cause, count in _causes(rows).most_common()),
            "",
            *(
                f"- **{row.name}** ({row.model or 'not built'}): {_plain(row.stopped)}"
                for row in sorted(rows, key=lambda r: (not r.model, r.name))
                if not row.captured
            ),
        ]
    ) + "\n"  # fmt: skip


def _line(row: Row) -> str:
    shown = {PASSED: "yes", WIDE: "float64"}
    cells = [shown.get(row.plans.get(plan, ""), "**no**") for plan in PLANS]
    return (
        f"| {row.name} | `{row.model}` | {row.kind} | {row.dtype} | {row.parameters:,} | "
        f"{' | '.join(cells)} | {row.worst:.0e} |"
    )


# architecture -> what lies behind a failure that was looked into.
KNOWN: Mapping[str, str] = {
    "paligemma": "torch.export's own program has another loss than eager, by 1e-4 and more; which line of the "
    "model does that is not known",
    "recurrent_gemma": "it keeps the state of the run before, with its graph, as an attribute, which cannot "
    "be copied",
    "parakeet_encoder": "a bias before BatchNorm has no gradient but rounding, 4e-15 of the largest gradient; "
    "the proof compares with 1e-15 of it",
}


def _failures(captured: Sequence[Row]) -> list[str]:
    """Each failing plan in a line, those of one cause together."""
    lines = []
    for row in sorted(captured, key=lambda r: r.name):
        reasons: dict[str, list[str]] = {}
        for plan, outcome in row.plans.items():
            if outcome not in (PASSED, WIDE):
                reasons.setdefault(outcome, []).append(plan)
        lines += [
            f"- **{row.name}**, {', '.join(plans)}: {_plain(reason)}"
            + (f" ({KNOWN[row.name]})" if row.name in KNOWN else "")
            for reason, plans in reasons.items()
        ]
    return lines or ["None."]


def _causes(rows: Sequence[Row]) -> Counter[str]:
    stopped = [row.stopped for row in rows if not row.captured]
    return Counter(next(why for part, why in CAUSES if part in text) for text in stopped)


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
@click.option("--note", default="", help="What the page says of this run.")
def main(
    results: Path, only: str, count: int, again: bool, seconds: float, memory_gb: float,
    path: Path | None, note: str,
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
        path.write_text(markdown(rows, len(known), note))
    captured = [row for row in rows if row.captured]
    sys.exit(0 if sum(row.passed for row in captured) >= 0.85 * len(captured) else 1)


def _summary(row: Row) -> str:
    failed = {plan: text for plan, text in row.plans.items() if text not in (PASSED, WIDE)}
    state = row.stopped or ("passed" if row.passed else str(failed))
    return f"{row.name} {row.seconds:.0f} s: {state}"


if __name__ == "__main__":
    main()
