"""What autograd keeps between forward and backward, against the price's saved bytes.

    OMP_NUM_THREADS=1 python benchmarks/accuracy/saved_activations.py --markdown benchmarks/results/saved_activations.md

Every architecture is captured and priced unsplit; then the program that the runtime would run on one
rank runs under saved-tensor hooks, and so does the eager model. Storages that are kept alive are counted
once each, in full, parameters and buffers left out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from autopar.capture.export import run_with_loss
from autopar.cost_model import find_hardware
from autopar.ir import UNSPLIT, Graph, Mesh, ParameterPlan, Plan, R
from autopar.planning.planning import Prepared, prepare_step
from autopar.program.program import build_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.tables import markdown_table
from benchmarks.zoo.models import NAMES, architecture, build
from tests.support.price_oracle import price

WITHIN = 0.02


class _Handle:
    """Stands for a saved tensor; it lives as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(forward: Callable[[], object], stored: Iterable[Tensor]) -> int:
    """Bytes of all storages that the graph behind the results of `forward` keeps, without `stored`."""
    return sum(x.untyped_storage().nbytes() for x in kept_tensors(forward, stored))


def kept_tensors(forward: Callable[[], object], stored: Iterable[Tensor]) -> list[Tensor]:
    """A tensor for each of these storages."""
    handles: weakref.WeakSet[_Handle] = weakref.WeakSet()

    def pack(x: Tensor) -> _Handle:
        handle = _Handle(x.detach())
        handles.add(handle)
        return handle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.tensor):
        results = forward()
    without = {x.untyped_storage().data_ptr() for x in stored}
    tensors = [handle.tensor for handle in handles]
    found = {x.untyped_storage().data_ptr(): x for x in tensors}
    del results  # until here, because it holds the graph
    return [x for at, x in found.items() if at not in without]


def unsplit_plan(graph: Graph, fingerprint: str) -> Plan:
    """The plan of a single rank."""
    return Plan(
        mesh=Mesh.of({"x": 1}),
        fingerprint=fingerprint,
        recipe="unsplit",
        micro_batches=1,
        parameters={name: ParameterPlan((R,), (R,)) for name in graph.parameters},
        inputs={name: (R,) for name in graph.inputs},
        ops={op.name: (UNSPLIT,) for op in graph.ops},
    )


def program_kept_bytes(prepared: Prepared, model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What the program of a single rank keeps."""
    captured, graph = prepared.captured, prepared.analysis.graph
    program = build_program(captured, prepared.analysis, unsplit_plan(graph, captured.fingerprint))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    stored: list[Tensor] = [parameters[spec.name] for spec in program.parameters]
    stored += [buffers[spec.name] for spec in program.buffers]
    stored += program.constants
    return kept_bytes(lambda: program.module(*stored, *inputs), stored)


def eager_kept_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What the model itself keeps."""
    stored = [*model.parameters(), *model.buffers()]
    return kept_bytes(lambda: run_with_loss(model, inputs, {}, None), stored)


def priced_bytes(prepared: Prepared) -> int:
    """What the price says."""
    plan = unsplit_plan(prepared.analysis.graph, prepared.captured.fingerprint)
    return price(prepared.analysis.graph, plan, find_hardware("cpu-gloo")).saved_bytes


@dataclass(frozen=True)
class Row:
    """Saved bytes of one architecture."""

    name: str
    dtype: torch.dtype
    priced_bytes: int
    program_bytes: int
    eager_bytes: int

    @property
    def error(self) -> float:
        """Error of the price, as a fraction of the bytes that the program keeps."""
        return self.priced_bytes / self.program_bytes - 1

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= WITHIN

    @property
    def cells(self) -> tuple[str, ...]:
        eager = self.priced_bytes / self.eager_bytes - 1
        sizes = (self.priced_bytes, self.program_bytes, self.eager_bytes)
        priced, program, own = (f"{size:,}" for size in sizes)
        dtype = str(self.dtype).removeprefix("torch.")
        return self.name, dtype, priced, program, f"{self.error:+.2%}", own, f"{eager:+.2%}"


def measure(name: str, dtype: torch.dtype | None = None) -> Row:
    """Prices and measures one architecture, in its widest dtype by default."""
    model, inputs = build(name, dtype=dtype)
    prepared = prepare_step(model, inputs)
    return Row(
        name,
        dtype or architecture(name).dtype,
        priced_bytes(prepared),
        program_kept_bytes(prepared, model, inputs),
        eager_kept_bytes(model, inputs),
    )


COLUMNS = ("architecture", "dtype", "priced", "program", "error", "eager", "error")


def markdown(rows: list[Row]) -> str:
    """The table as a page."""
    within = sum(row.is_within for row in rows)
    lines = [
        "# Saved activations",
        "",
        "Bytes that autograd keeps between forward and backward of one step, every storage counted once and in",
        "full, parameters and buffers left out: as the rules price them (`autopar/rules/kept/`), as the program",
        "that the runtime runs on one rank really keeps them under saved-tensor hooks, and as the eager model does.",
        f"{within} of {len(rows)} are within {WITHIN:.0%} of the program; what is missing are single numbers, such",
        "as a loss's count of targets. Measured on the CPU; for a model captured elsewhere the price assumes the",
        "fused kernels of a GPU, which are not measured here. The eager model runs other ops: untraced,",
        "transformers leaves out causal masks and shares grouped heads without repeating them;",
        "whisper makes copies that capture takes out.",
        "Made by",
        "`OMP_NUM_THREADS=1 python benchmarks/accuracy/saved_activations.py "
        "--markdown benchmarks/results/saved_activations.md`.",
        "",
        *markdown_table(COLUMNS, [row.cells for row in rows], text_columns=2),
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--names", default=",".join(NAMES), help="Architectures, separated by commas.")
@click.option("--dtypes", default="widest,bfloat16", help="Of weights, separated by commas.")
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the table there.")
def main(names: str, dtypes: str, path: Path | None) -> None:
    """Print a row per architecture; exit 1 if a price is off by more than 2 %."""
    console = Console(width=120)
    rows = []
    cases = [(name, dtype) for dtype in dtypes.split(",") for name in names.split(",")]
    for name, dtype in track(cases, description="architectures", console=console):
        rows.append(measure(name, None if dtype == "widest" else getattr(torch, dtype)))
        console.print("  ".join(rows[-1].cells))
    if path is not None:
        path.write_text(markdown(rows))
    sys.exit(0 if all(row.is_within for row in rows) else 1)


if __name__ == "__main__":
    main()
