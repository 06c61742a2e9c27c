"""The verdict of `verify` on right plans, over the architectures of the zoo in float32 and bfloat16.

    OMP_NUM_THREADS=1 python benchmarks/zoo/verdicts.py --results benchmarks/zoo/verdicts.jsonl \\
        --order small --minutes 60 --markdown benchmarks/results/zoo_verdicts.md

Each architecture is built small and cast to each of the two formats, and three of its plans are compared with the
single device: a searched one on two axes, one with two stages and four micro-batches, and one drawn at random. All
three are right, so that a verdict other than "passed" is a false alarm or a fault. The order `drawn` is drawn at random
with a seed, so that the first so many are a fair sample of all; the order `small` takes what the zoo's page captures,
few parameters first. A run goes on where the last one ended, so that the zoo can be examined in slices (`--minutes`);
each result names the version of the code that gave it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.stored import store, stored
from benchmarks.tables import markdown_table
from benchmarks.zoo.rows import PASSED, RANDOM, Row, code_version, packages_used
from benchmarks.zoo.run import Bounds, architectures, examined

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OVER_TIME = "took over"  # the beginning of what is said of a process that was ended
PLANS = ("dp=2 tp=2", "pp=2", RANDOM)
ZOO_PAGE = Path(__file__).parents[2] / "benchmarks/results/zoo.md"
COLUMNS = ("architecture", "format", "verdict", "largest error / bound", "of the tensor")


@dataclass(frozen=True)
class Result:
    """The verdicts on the plans of one architecture in one format.

    Attributes:
        name: architecture and format, which tell the result from the others.
        architecture: model type, or `diffusers:` and a class.
        dtype: format of weights and floating inputs.
        version: `code_version` of the code that examined it.
        stopped: the reason why the model was not built, run or captured in this format, "" if it was.
        misses: plan -> the reason why it did not pass or was not compared in time, without the plans that passed.
        worst: the largest error of all plans relative to its bound.
        worst_tensor: the tensor that has this error, in words.
        seconds: duration of the examination.
    """

    name: str
    architecture: str
    dtype: str
    version: str
    stopped: str
    misses: dict[str, str]
    worst: float
    worst_tensor: str
    seconds: float

    @property
    def verdict(self) -> str:
        """`passed`, `not run`, the plans that did not pass, or else those that were not compared in time."""
        if self.stopped:
            return "not run"
        if self.failed:
            return f"**no**: {', '.join(self.failed)}"
        return f"not in time: {', '.join(self.misses)}" if self.misses else PASSED

    @property
    def failed(self) -> dict[str, str]:
        """Plan -> the reason why it did not pass, without the plans that were not compared in time."""
        return {plan: why for plan, why in self.misses.items() if not why.startswith(OVER_TIME)}

    @property
    def cells(self) -> tuple[str, ...]:
        share = "-" if self.stopped else f"{self.worst:.3f}"
        words = self.worst_tensor.partition(":")[0]
        return self.architecture, self.dtype, self.verdict, share, words.replace(", step 1", "")


def named(architecture: str, dtype: str) -> str:
    """The name of the result of an architecture in a format."""
    return f"{architecture} in {dtype}"


def smallest_first(page: str) -> list[str]:
    """The architectures that the zoo's page captures, those with few parameters first.

    >>> smallest_first(
    ...     "## Captured\\n| a | A(x) | text | float32 | 2,000 | yes |\\n| b | B(x) | text | float32 | 900 | yes |"
    ... )
    ['b', 'a']
    """
    rows = [line.split(" | ") for line in page.partition("## Captured")[2].splitlines()]
    sizes = {
        row[0].removeprefix("| "): int(row[4].replace(",", ""))
        for row in rows
        if len(row) > 5 and row[4].replace(",", "").isdigit()
    }
    return sorted(sizes, key=lambda name: sizes[name])


def result_of(row: Row, dtype: str, version: str) -> Result:
    """The result that an examination by a version of the code gives."""
    reason = row.stopped or row.differs
    return Result(
        name=named(row.name, dtype),
        architecture=row.name,
        dtype=dtype,
        version=version,
        stopped=reason or ("" if row.plans else f"ended in the stage {row.stage}"),
        misses={plan: text for plan, text in row.plans.items() if text != PASSED},
        worst=row.worst,
        worst_tensor=row.worst_tensor,
        seconds=row.seconds,
    )


def markdown(results: Sequence[Result], known: int, note: str = "") -> str:
    """The page of the results of a part of `known` architectures; `note` says what is particular to this run."""
    packages = ", ".join(f"{name} {version}" for name, version in packages_used().items())
    misses = [f"- **{r.name}**, {p}: {t}" for r in results for p, t in r.misses.items()]
    left_out = [f"- **{r.name}**: {r.stopped}" for r in results if r.stopped]
    lines = [
        "# Verdicts on the zoo",
        "",
        "[`verify`](../../docs/verify.md) "
        "on right plans of [the zoo](zoo.md)'s architectures, in float32 and in bfloat16: three",
        f"plans of each ({'; '.join(PLANS)}), all ranks simulated, against the single device in float64. A verdict",
        "other than `passed` is a false alarm of the bound or a fault. Made by",
        "`OMP_NUM_THREADS=1 python benchmarks/zoo/verdicts.py --results benchmarks/zoo/verdicts.jsonl --order small",
        "--markdown benchmarks/results/zoo_verdicts.md`, few parameters first, in slices (`--minutes 60`),",
        f"with {packages}. The versions of the code: {', '.join(sorted({r.version for r in results}))}.",
        *([note] if note else []),
        "",
        f"- examined: {len({r.architecture for r in results})} of {known} architectures; "
        f"{len({r.architecture for r in results if not r.stopped})} run",
        *(f"- {_counted(results, dtype)}" for dtype in DTYPES),
        "",
        "The share is the largest error of a tensor relative to its bound, over all plans and both arithmetics.",
        "",
        *markdown_table(COLUMNS, [r.cells for r in results if not r.stopped]),
        "",
        "## Plans that did not pass, or were not compared in time",
        "",
        *(misses or ["None."]),
        "",
        "## Not run",
        "",
        *(left_out or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def _counted(results: Sequence[Result], dtype: str) -> str:
    """How many results of a format passed, in words."""
    run = [r for r in results if r.dtype == dtype and not r.stopped]
    passed, failed = sum(not r.misses for r in run), sum(bool(r.failed) for r in run)
    return (
        f"in {dtype}: {passed} of {len(run)} that run in this format pass with all plans, {failed} fail, and "
        f"{len(run) - passed - failed} have a plan that was not compared in time"
    )


@click.command(context_settings={"show_default": True})
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Lines of JSON.")
@click.option("--only", default="", help="Architectures, separated by commas; all by default.")
@click.option(
    "--order",
    type=click.Choice(["drawn", "small"]),
    default="drawn",
    help="All in an order drawn at random, or what the zoo's page captures, small ones first.",
)
@click.option("--count", default=0, help="The first so many of the order; 0 for all.")
@click.option("--minutes", default=0.0, help="Begin no result after so many; 0 for no end.")
@click.option("--again", is_flag=True, help="Examine those that have a result too.")
@click.option("--seconds", default=120.0, help="Bound on the processor time of one result.")
@click.option("--memory-gb", default=8.0, help="Bound on the memory of one process.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page there.")
@click.option("--note", default="", help="What the page says of this run.")
def main(
    results: Path,
    only: str,
    order: str,
    count: int,
    minutes: float,
    again: bool,
    seconds: float,
    memory_gb: float,
    path: Path | None,
    note: str,
) -> None:
    """Print a line per architecture and format; exit 1 if a plan of any does not pass."""
    console, known, start_seconds = Console(), architectures(), time.monotonic()
    ordered = known if order == "drawn" else _known_of_page(known)
    names = only.split(",") if only else ordered[: count or None]
    done = {} if again else stored(results, Result)
    left = [(name, dtype) for name in names for dtype in DTYPES if named(name, dtype) not in done]
    for result in _examined(left, Bounds(seconds, int(memory_gb * 1e9))):
        store(results, result)
        console.print(_line(result), highlight=False, markup=False, soft_wrap=True)
        if minutes and time.monotonic() - start_seconds > 60 * minutes:
            break
    found = list(stored(results, Result).values())
    if path is not None:
        path.write_text(markdown(found, len(known), note))
    sys.exit(1 if any(result.failed for result in found) else 0)


def _known_of_page(known: Sequence[str]) -> list[str]:
    return [name for name in smallest_first(ZOO_PAGE.read_text()) if name in known]


def _examined(left: Sequence[tuple[str, str]], bounds: Bounds) -> Iterator[Result]:
    """The results of architectures in formats, one after another."""
    version = code_version()
    for name, dtype in left:
        (row,) = examined([name], bounds, jobs=1, backend="none", dtype=DTYPES[dtype], plans=PLANS)
        yield result_of(row, dtype, version)


def _line(result: Result) -> str:
    reasons = result.stopped or result.misses or ""
    return f"{result.name} {result.seconds:.0f} s: {result.verdict} {result.worst:.3f} {reasons}"


if __name__ == "__main__":
    main()
