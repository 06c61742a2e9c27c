"""Recomputation of ops against that of whole blocks, in the same memory: bytes and step time, measured.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.bench_recomputation --markdown table.md

Architectures of `benchmarks.zoo.models` are captured unsplit at a larger batch, and trained on one rank by three plans:
with all activations kept; with so many whole blocks recomputed as leave about half of what recomputation can save;
and with the ops recomputed that the exact program finds for the bytes that those blocks keep. Kept bytes are
those of saved-tensor hooks, against the price. Times are processor time of a whole step, forward and backward,
the least of several rounds in which the plans take turns, so that other load of the machine touches all alike.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from rich.console import Console
from torch import Tensor, nn

import autopar
from autopar.cost_model import Hardware, find_hardware
from autopar.ir.recompute import Recompute
from autopar.pipeline.stage_costs import StageTables
from autopar.planning.planning import Prepared, prepare_step
from autopar.runtime.model.module import CompiledModule
from autopar.search.exact.selection import select
from benchmarks.accuracy.saved_activations import kept_bytes, unsplit_plan
from benchmarks.tables import markdown_table
from benchmarks.zoo.models import build

NAMES = "llama,mistral,qwen2,gemma2,gpt2,gptneox,opt,bert,roberta,bart"
WITHIN = 0.02


@dataclass(frozen=True)
class Run:
    """One plan of an architecture.

    Attributes:
        priced_bytes: saved activations by the cost model.
        kept_bytes: bytes that autograd keeps, by saved-tensor hooks.
        seconds: processor time of a step.
    """

    priced_bytes: float
    kept_bytes: float
    seconds: float

    @property
    def error(self) -> float:
        """Error of the price, as a fraction of what is kept."""
        return self.priced_bytes / self.kept_bytes - 1


@dataclass(frozen=True)
class Row:
    """One architecture: everything kept, whole blocks recomputed, ops recomputed."""

    name: str
    everything: Run
    blocks: Run
    ops: Run

    @property
    def ratio(self) -> float:
        """Time of a step with ops recomputed, in times of one with whole blocks recomputed."""
        return self.ops.seconds / self.blocks.seconds

    @property
    def is_good(self) -> bool:
        runs = (self.everything, self.blocks, self.ops)
        return self.ratio < 1 and all(abs(run.error) <= WITHIN for run in runs)

    @property
    def cells(self) -> tuple[str, ...]:
        runs = (self.everything, self.blocks, self.ops)
        sizes = [f"{run.kept_bytes / 1e6:.3f} ({run.error:+.2%})" for run in runs]
        times = [f"{run.seconds * 1e3:.1f}" for run in runs]
        return self.name, *sizes, *times, f"{self.ratio:.3f}"


COLUMNS = ("architecture", "MB kept by all", "blocks", "ops", "ms of all", "blocks", "ops", "ops / blocks")


def enlarged(inputs: Sequence[Tensor], times: int) -> tuple[Tensor, ...]:
    """The batch, repeated."""
    return tuple(torch.cat([x] * times) for x in inputs)


def half(tables: StageTables) -> tuple[Recompute, Recompute]:
    """The number of whole blocks that leaves about half of what can be saved, and the ops for the same bytes."""
    most, least = (float(tables.at(how).saved_bytes[0, -1]) for how in ("none", "full"))
    counts: list[Recompute] = [*range(1, tables.repeating_blocks), "full"]
    held = {how: float(tables.at(how).saved_bytes[0, -1]) for how in counts}
    blocks = min(counts, key=lambda how: abs(held[how] - (most + least) / 2))
    return blocks, select(tables.selectable, (held[blocks] - least) / (most - least))


def compiled(model: nn.Module, prepared: Prepared, recompute: Recompute) -> CompiledModule:
    """A copy of the model on one rank."""
    plan = unsplit_plan(prepared.analysis.graph, prepared.captured.fingerprint)
    return autopar.compile(copy.deepcopy(model), plan=replace(plan, recompute=recompute))


def measured_bytes(module: CompiledModule, inputs: tuple[Tensor, ...]) -> int:
    """What one micro-batch keeps between forward and backward."""
    runner = module._kept.ready[True][0].bound._runner  # type: ignore[union-attr]
    runner.begin()
    return kept_bytes(lambda: runner.run(inputs), runner.leaves)


def step_seconds(module: CompiledModule, inputs: tuple[Tensor, ...]) -> float:
    """Processor time of one step."""
    module.zero_grad()
    begin = time.process_time()
    module.step(*inputs)
    return time.process_time() - begin


def measure(name: str, *, times: int, rounds: int) -> Row:
    """Measures one architecture in float32."""
    model, inputs = build(name, dtype=torch.float32)
    inputs = enlarged(inputs, times)
    found = contenders(model, inputs, find_hardware("cpu-gloo"))
    for module, _ in found:
        module.step(*inputs)
    samples = [[step_seconds(module, inputs) for module, _ in found] for _ in range(rounds)]
    runs = (
        Run(priced_bytes, measured_bytes(module, inputs), min(seconds))
        for (module, priced_bytes), seconds in zip(found, zip(*samples, strict=True), strict=True)
    )
    return Row(name, *runs)


def contenders(model: nn.Module, inputs: tuple[Tensor, ...], hardware: Hardware) -> list[tuple[CompiledModule, float]]:
    """Copies of a model on one rank, and the bytes that each is priced to keep.

    In this order: everything kept; whole blocks recomputed; ops recomputed that keep what those blocks keep.
    """
    prepared = prepare_step(model, inputs)
    plan = unsplit_plan(prepared.analysis.graph, prepared.captured.fingerprint)
    tables = StageTables(prepared.analysis.graph, plan, hardware, world=plan.mesh)
    return [
        (compiled(model, prepared, each), float(tables.at(each).saved_bytes[0, -1])) for each in ("none", *half(tables))
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = markdown_table(COLUMNS, [row.cells for row in rows], text_columns=1)
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--names", default=NAMES, help="Architectures, separated by commas.")
@click.option("--times", default=32, help="How often the batch of 4 is repeated.")
@click.option("--rounds", default=9, help="Rounds of one step of each plan.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(names: str, times: int, rounds: int, path: Path | None) -> None:
    """Print a row per architecture; exit 1 if a price is off by 2 % or ops are not faster than blocks."""
    console = Console(width=140)
    rows = []
    for name in names.split(","):
        rows.append(measure(name, times=times, rounds=rounds))
        console.print("  ".join(rows[-1].cells))
    if path is not None:
        path.write_text(markdown(rows))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
