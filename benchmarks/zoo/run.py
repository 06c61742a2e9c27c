"""Parity of plans with one device over the architectures of `transformers`, and diffusion blocks of `diffusers`.

    OMP_NUM_THREADS=1 python benchmarks/zoo/run.py --results /tmp/zoo.jsonl --jobs 2 --markdown
    benchmarks/results/zoo.md

With `--libraries` it is done for models of timm, vit-pytorch and others (libraries.py), where these are installed.

Each is built small (small.py, diffusion.py, libraries.py), captured, and six plans of it are simulated and compared
(examine.py); what cannot be captured goes through torch.compile(backend="autopar") on two real ranks
(backend.py). All that runs in processes of their own, forked from this one, with a bound on time and memory.
Results are lines of JSON with the version of the code that gave them: an interrupted run goes on where it
stopped, and after a change of the code begins anew. The order is drawn at random once, so that the first hundred
are a fair sample of all.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from autopar.cost_model import find_hardware
from autopar.planning.planning import make_plan
from autopar.proof.subject import Subject
from autopar.search.request.request import Request

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.zoo import backend as zoo_backend
from benchmarks.zoo import diffusion as zoo_diffusers
from benchmarks.zoo import libraries as zoo_libraries
from benchmarks.zoo.examine import examine
from benchmarks.zoo.page import markdown
from benchmarks.zoo.process import Task
from benchmarks.zoo.rows import PASSED, PLANS, SPLIT_BY_BACKEND, WIDE, Row, append, code_version, read, write

ORDER_SEED = 0


def architectures() -> list[str]:
    """All model types with a model, in an order drawn at random, the same each time; then those of diffusers."""
    names = sorted(modeling_auto.MODEL_MAPPING_NAMES)
    random.Random(ORDER_SEED).shuffle(names)
    return [*names, *(zoo_diffusers.NAMES if zoo_diffusers.installed() else ())]


class _Smallest(nn.Module):
    """A model of one layer, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


@functools.cache
def warm_up() -> None:
    """Imports, once, what every examination does, so that the processes forked from this one need not.

    A capture and a search of a model of one layer import the exporter, the solver and what belongs to them. There is no
    backward: torch refuses one in a fork of a process that has had one.
    """
    importlib.import_module("transformers.modeling_utils")
    importlib.import_module("transformers.modeling_layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = Subject.of(_Smallest(), (torch.ones(4, 4),))
        make_plan(subject.prepared, Request(find_hardware("cpu-gloo"), mesh={"dp": 2}, recipe="ddp", must_fit=False))


@dataclass(frozen=True)
class Bounds:
    """What a process may take: processor time, and data."""

    seconds: float
    memory_bytes: int


class Examination:
    """One architecture under way: examined in a process, then, if it is to be, run on two ranks."""

    def __init__(
        self, name: str, bounds: Bounds, folder: Path, *, backend: str, dtype: torch.dtype | None, plans: Sequence[str]
    ) -> None:
        self.name, self.bounds, self.folder, self.backend = name, bounds, folder, backend
        self._scratch, self._log = folder / "row.json", folder / "log"
        self._log.touch()  # a process may be ended before it says a word
        self._row = Row(name)
        self._on_ranks = False
        self._task = self._start([partial(_examine, name, self._scratch, dtype, plans)])
        self._seconds = 0.0

    def ended(self) -> Row | None:
        """The row once all is done."""
        if not self._task.ended():
            return None
        self._seconds += self._task.elapsed_seconds
        row = self._read()
        row.seconds = self._seconds
        if self._on_ranks or not self._goes_through_the_backend(row):
            return row
        self._row, self._on_ranks = row, True
        ranks = [partial(zoo_backend.serve, row, rank, self.folder, self._scratch) for rank in range(zoo_backend.RANKS)]
        self._task = self._start(ranks)
        return None

    def _goes_through_the_backend(self, row: Row) -> bool:
        refused = bool(row.stopped or row.differs)
        return row.built and {"none": False, "refused": refused, "all": True}[self.backend]

    def _start(self, works: Sequence[partial[None]]) -> Task:
        quiet = [partial(_quietly, work, self._log) for work in works]
        return Task(quiet, self.bounds.seconds, self.bounds.memory_bytes)

    def _read(self) -> Row:
        """What the process left, with why it ended if it did not end by itself."""
        row = Row(**json.loads(self._scratch.read_text())) if self._scratch.exists() else self._row
        if not self._task.failure:
            return row
        last = (self._log.read_text().splitlines() or [""])[-1]
        why = f"{self._task.failure}: {last[:300]}".removesuffix(": ")
        if self._on_ranks:
            left = next((p for p in SPLIT_BY_BACKEND if p not in row.backend), "end")
            row.backend[left] = why
        elif row.stage in ("build", "capture"):
            row.stopped = f"{row.stage} {why}"
        else:
            row.plans[row.stage] = why
        return row


def _quietly(work: partial[None], log: Path) -> None:
    """What it says, and the traceback of what it raises, go to the end of `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)  # standard output
    os.dup2(file, 2)  # and error
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # default ids lie outside a small vocabulary
    work()


def _examine(name: str, scratch: Path, dtype: torch.dtype | None, plans: Sequence[str]) -> None:
    write(examine(name, partial(write, path=scratch), dtype, plans), scratch)


def examined(
    names: Sequence[str],
    bounds: Bounds,
    *,
    jobs: int,
    backend: str,
    dtype: torch.dtype | None = None,
    plans: Sequence[str] = PLANS,
) -> Iterator[Row]:
    """The rows of architectures, `jobs` at a time, in the order in which they are done."""
    warm_up()
    waiting, running = list(reversed(names)), list[Examination]()
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place = Path(tempfile.mkdtemp(dir=folder))
                name = waiting.pop()
                running.append(Examination(name, bounds, place, backend=backend, dtype=dtype, plans=plans))
            for one in list(running):
                row = one.ended()
                if row is not None:
                    running.remove(one)
                    yield row
            time.sleep(0.02)
    finally:
        shutil.rmtree(folder)


@click.command(context_settings={"show_default": True})
@click.option("--results", type=click.Path(path_type=Path), required=True, help="Lines of JSON.")
@click.option("--libraries", is_flag=True, help="Models of timm and other libraries of layers in place of these.")
@click.option("--only", default="", help="Architectures, separated by commas; all by default.")
@click.option("--count", default=0, help="The first so many of the order; 0 for all.")
@click.option("--again", is_flag=True, help="Examine those that have a result too.")
@click.option("--any-version", is_flag=True, help="Take results of other versions of the code as they are.")
@click.option("--jobs", default=1, help="How many at a time.")
@click.option(
    "--backend",
    type=click.Choice(["refused", "all", "none"]),
    default="refused",
    help="What runs through torch.compile on two ranks: what is not captured, all, nothing.",
)
@click.option(
    "--dtype",
    type=click.Choice(["widest", "float32", "bfloat16"]),
    default="widest",
    help="Format of weights and floating inputs; widest is float64 where the model runs so.",
)
@click.option("--seconds", default=120.0, help="Bound on the time of one architecture.")
@click.option("--memory-gb", default=8.0, help="Bound on the memory of one process.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page there.")
@click.option("--note", default="", help="What the page says of this run.")
def main(
    results: Path,
    libraries: bool,
    only: str,
    count: int,
    again: bool,
    any_version: bool,
    jobs: int,
    backend: str,
    dtype: str,
    seconds: float,
    memory_gb: float,
    path: Path | None,
    note: str,
) -> None:
    """Print a line per architecture; exit 1 if under 85 % of those captured pass."""
    console, version = Console(), code_version()
    known = [*zoo_libraries.names()] if libraries else architectures()
    names = only.split(",") if only else known[: count or None]
    wanted = None if any_version else version
    done = {} if again else read(results, wanted)
    left = [name for name in names if name not in done]
    bounds = Bounds(seconds, int(memory_gb * 1e9))
    rows = examined(
        left, bounds, jobs=jobs, backend=backend, dtype=None if dtype == "widest" else getattr(torch, dtype)
    )
    for row in track(rows, description="architectures", console=console, total=len(left)):
        append(replace(row, version=version), results)
        console.print(_summary(row), highlight=False, markup=False, soft_wrap=True)
    found = [row for row in read(results, wanted).values() if row.name in names or not only]
    if path is not None:
        path.write_text(markdown(found, len(known), note, of_libraries=libraries))
    captured = [row for row in found if row.captured]
    sys.exit(0 if sum(row.passed for row in captured) >= 0.85 * len(captured) else 1)


def _summary(row: Row) -> str:
    failed = {plan: text for plan, text in row.plans.items() if text not in (PASSED, WIDE)}
    state = row.stopped or row.differs or ("passed" if row.passed else str(failed))
    backend = f"; backend: {row.backend}" if row.backend else ""
    return f"{row.name} {row.seconds:.0f} s: {state}{backend}"


if __name__ == "__main__":
    main()
