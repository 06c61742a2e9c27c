"""`autopar calibrate`: the command line of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.calibrate import measure
from autopar.calibrate.document import check_hardware_output, to_hardware, to_toml
from autopar.calibrate.run import calibrate, is_first_rank
from autopar.cost_model import Hardware, Link
from autopar.ir.files import save_text
from autopar.views.terminal import Screen


@click.command(
    "calibrate",
    help="""Measure this machine and write its hardware file.

Times matrix products by shape and dtype, memory bandwidth, the launch of a kernel, and every
collective by size, fits the figures of the cost model to them, and writes a file that --cluster
takes. Under torchrun all its ranks take part; alone it starts processes itself. Nothing else should
run meanwhile.

\b
Examples:
  autopar calibrate --output my.toml --quick
  autopar calibrate --output my.toml --ranks 4 --dtype float32
  torchrun --nproc-per-node 8 --no-python autopar calibrate --output my.toml
  autopar explain examples.gpt:example --cluster my.toml""",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="The file to write; an older one is replaced at the end.",
)
@click.option("--device", metavar="cpu|cuda", help="What to measure; by default cuda if present.")
@click.option("--quick", is_flag=True, help="A few sizes and repeats: seconds instead of minutes.")
@click.option("--ranks", type=int, metavar="N", help="Processes to start; by default one per GPU or processor.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    help="Number format of matrix products, by default all; may be repeated.",
)
@click.option("--name", help="Name of the hardware; by default that of the file.")
def calibrate_command(
    output: Path, device: str | None, quick: bool, ranks: int | None, dtypes: tuple[str, ...], name: str | None
) -> None:
    first = is_first_rank()
    if first:
        check_hardware_output(output)
    with _bar(first) as progress:
        found = calibrate(device=device, ranks=ranks, quick=quick, formats=dtypes, progress=progress)
    if first:
        name = name or output.stem
        save_text(to_toml(found, name), output)
        Screen().print(summary(to_hardware(found, name)))
        Screen().print(f"Wrote {output}", soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _bar(shown: bool) -> Iterator[measure.Progress]:
    """A progress bar on a terminal; nothing if the output is a file, or on other ranks."""
    console = Screen(stderr=True)
    columns = (TextColumn("{task.description:<46}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)


def summary(hardware: Hardware) -> Table:
    """A table of the measured figures, in common units."""
    table = Table(title=f"{hardware.name}: one of {hardware.devices_per_node} ranks of a node")
    for column in ("figure", "value", "kind"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for label, value, figure in _lines(hardware):
        table.add_row(label, value, hardware.source(figure).kind)
    return table


def _lines(hardware: Hardware) -> Iterator[tuple[str, str, str]]:
    for dtype, flops in hardware.dtype_flops:
        yield f"products in {dtype}", f"{flops / 1e9:,.1f} GFLOP/s", f"peak_flops.{dtype}"
    half = f"{hardware.matmul_efficiency:.0%}, half below {hardware.matmul_half_size:.0f}"
    yield "of it reached", half, "matmul_efficiency"
    bandwidth = hardware.memory_bytes_per_second
    yield "memory bandwidth", f"{bandwidth / 1e9:,.1f} GB/s", "memory_bytes_per_second"
    yield "of it reached", f"{hardware.memory_efficiency:.0%}", "memory_efficiency"
    yield "memory", f"{hardware.memory_bytes / 1e9:,.1f} GB", "memory_bytes"
    yield "launch", _microseconds(hardware.launch_seconds), "launch_seconds"
    yield "host per op", _microseconds(hardware.host_seconds), "host_seconds"
    yield from _link_lines("inside a node", hardware.inside_node, "inside_node")
    yield from _link_lines("across nodes", hardware.across_nodes, "across_nodes")


def _link_lines(words: str, link: Link, table: str) -> Iterator[tuple[str, str, str]]:
    rate = f"{link.bandwidth_bytes_per_second / 1e9:,.3g} GB/s"
    yield f"{words}, ring", rate, f"{table}.bandwidth_bytes_per_second"
    yield f"{words}, hop", _microseconds(link.latency_seconds), f"{table}.latency_seconds"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"
