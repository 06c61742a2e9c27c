"""The most that autograd saves on every pipeline rank, on Gloo ranks, against the formula and the simulation.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/pipeline_memory.py

A rank r of p holds min(m, p - r) micro-batches of 1F1B at the most, and all m of GPipe (Narayanan et al. 2021,
section 2.2). Measured are the storages that saved-tensor hooks see, each once, parameters left out;
simulated is the peak of `autopar.pipeline.simulation` with the bytes that the cost model has for a stage.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

import autopar
from autopar.cost_model import find_hardware
from autopar.explanation.simulated import SimulatedStep
from autopar.ir import Graph, Pipeline, Plan
from autopar.pipeline.parts import block_starts
from autopar.pipeline.schedules import actions
from autopar.pipeline.simulation import simulate
from autopar.planning.planning import make_plan, prepare_step
from autopar.search.request.request import Request

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))
from gpt import loss_fn

from benchmarks.speed.bench_step_time import Sizes
from benchmarks.tables import markdown_table


@dataclass
class _Held:
    """A saved tensor; when it goes, autograd has let go of it."""

    tensor: Tensor


class SavedBytes:
    """Saved-tensor hooks that count the bytes of what is saved, every storage once.

    Attributes:
        most: the most so far.
    """

    def __init__(self, left_out: Sequence[Tensor]) -> None:
        self._left_out = {x.untyped_storage().data_ptr() for x in left_out}
        self._uses: Counter[int] = Counter()
        self.now = self.most = 0

    def pack(self, x: Tensor) -> _Held:
        held, key = _Held(x), x.untyped_storage().data_ptr()
        if key not in self._left_out:
            self._count(key, 1, x.untyped_storage().nbytes())
            weakref.finalize(held, self._count, key, -1, x.untyped_storage().nbytes())
        return held

    def _count(self, key: int, change: int, size: int) -> None:
        before = self._uses[key]
        self._uses[key] += change
        self.now += size * (bool(self._uses[key]) - bool(before))
        self.most = max(self.most, self.now)

    @staticmethod
    def unpack(held: _Held) -> Tensor:
        return held.tensor


def plan_of(sizes: Sizes, schedule: str, ranks: int, micro_batches: int) -> tuple[Graph, Plan]:
    """A stage of equally many layers on every rank; the first has the embedding, the last the head."""
    part = tuple(x[: len(x) // micro_batches] for x in sizes.batch_of(0))
    prepared = prepare_step(sizes.model(), part, loss_fn=loss_fn)
    graph = prepared.analysis.graph
    plan = make_plan(prepared, Request(find_hardware("cpu-gloo"), mesh={"dp": 1}, micro_batches=micro_batches))
    starts = block_starts(graph)
    cuts = tuple(starts[1 + i * (sizes.layers // ranks)] for i in range(1, ranks))
    return graph, replace(plan, pipeline=Pipeline(ranks, schedule, cuts))


def measured(sizes: Sizes, plan: Plan) -> int:
    """The most bytes that autograd holds on this rank in a step."""
    model, batch = sizes.model(), sizes.batch_of(0)
    compiled = autopar.compile(model, loss_fn=loss_fn, plan=plan)
    compiled.step(*batch)
    parameters = [p.to_local() for p in compiled.parameters()]  # type: ignore[attr-defined]
    saved = SavedBytes(parameters)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        compiled.step(*batch)
    return saved.most


def simulated(graph: Graph, plan: Plan) -> tuple[float, ...]:
    """The peak of saved bytes on every rank, as the event simulation has it."""
    assert plan.pipeline is not None
    costs = SimulatedStep(graph, plan, find_hardware("cpu-gloo")).costs
    saved_alone = [replace(cost, kept_bytes=0, working_bytes=0) for cost in costs]
    return simulate(actions(plan.pipeline, plan.micro_batches), saved_alone).peak_bytes


def work(rank: int, ranks: int, port: int, sizes: Sizes, micro_batches: int, path: Path | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found: dict[str, list[int]] = {}
    expected: dict[str, tuple[float, ...]] = {}
    for schedule in ("gpipe", "1f1b"):
        graph, plan = plan_of(sizes, schedule, ranks, micro_batches)
        found[schedule], expected[schedule] = [0] * ranks, simulated(graph, plan)
        dist.all_gather_object(found[schedule], measured(sizes, plan))
    if rank == 0:
        rows = [
            row(r, ranks, micro_batches, {k: (v[r], expected[k][r]) for k, v in found.items()}) for r in range(ranks)
        ]
        show(rows, path)
    dist.destroy_process_group()


COLUMNS = (
    "rank",
    "GPipe measured MB",
    "simulated MB",
    "1F1B measured MB",
    "simulated MB",
    "1F1B : GPipe measured",
    "min(m, p - r) : m",
)


def row(rank: int, ranks: int, micro_batches: int, found: dict[str, tuple[int, float]]) -> tuple[str, ...]:
    """A rank's cells; `found` is (measured, simulated) bytes by schedule."""
    cells = [f"{x / 1e6:.2f}" for schedule in ("gpipe", "1f1b") for x in found[schedule]]
    ratio = found["1f1b"][0] / found["gpipe"][0]
    share = min(micro_batches, ranks - rank) / micro_batches
    return str(rank), *cells, f"{ratio:.3f}", f"{share:.3f}"


def show(rows: Sequence[tuple[str, ...]], path: Path | None) -> None:
    table = Table(*COLUMNS)
    for cells in rows:
        table.add_row(*cells)
    Console(width=130).print(table)
    if path is not None:
        path.write_text("\n".join(markdown_table(COLUMNS, rows)) + "\n")


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=4, help="Processes, each a rank of the pipeline.")
@click.option("--micro-batches", default=8)
@click.option("--layers", default=8)
@click.option("--width", default=128)
@click.option("--heads", default=4)
@click.option("--sequence", default=128)
@click.option("--batch", default=16, help="Sequences of the global batch.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(ranks: int, micro_batches: int, path: Path | None, **sizes: int) -> None:
    """Print a row per rank."""
    mp.spawn(work, (ranks, get_free_port(), Sizes(**sizes, rounds=1, steps=1), micro_batches, path), ranks)


if __name__ == "__main__":
    main()
