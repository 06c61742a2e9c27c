"""The command line; `python -m benchmarks.accelerator --help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from autopar.calibrate.devices import check_device, default_device
from autopar.errors import AutoparError
from benchmarks.accelerator.figures import Result
from benchmarks.accelerator.page import summary, to_html
from benchmarks.accelerator.parts import PARTS, Context, Part, Scope
from benchmarks.accelerator.runner import Run, run_parts
from benchmarks.stored import code_version

WHOLE_MINUTES = 3.0  # in fewer, each part takes its first subject alone


def identity(device: str, scope: Scope) -> dict[str, str]:
    """What results depend on."""
    name = "the processor" if device == "cpu" else torch.get_device_module(device).get_device_name()
    return {
        "version": code_version("autopar", "passes", "cost_model", "benchmarks/accelerator"),
        "torch": torch.__version__,
        "device": device,
        "name": name,
        "scope": scope,
    }


def chosen(only: str) -> Sequence[Part]:
    """The parts with these names, in the order of the table. Raises AutoparError for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise AutoparError(f"There is no part {name!r}; choose from {', '.join(known)}.")
    return [part for part in PARTS if part.name in names or not names]


def run(folder: Path, device: str, minutes: float, only: str = "") -> list[Result]:
    """Runs parts and writes JSON and page into the folder.

    Raises AutoparError for an unknown part, and for a device that this machine lacks.
    """
    parts = chosen(only)
    check_device(device, 1)
    scope: Scope = "whole" if minutes >= WHOLE_MINUTES else "slice"
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(torch.device(device), scope, folder.resolve())
    call = Run(context, 60 * minutes, identity(device, scope))
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(parts))

        def begin(part: Part) -> None:
            progress.update(bar, description=part.name, completed=parts.index(part))

        found = run_parts(call, parts, begin)
        progress.update(bar, description="done", completed=len(parts))
    (folder / "page.html").write_text(to_html(found, PARTS), encoding="utf-8")
    return found


def _set_environment(device: str) -> None:
    """Sets what libraries read when a part's process starts."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    if device != "cpu":
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(16, cores))


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for results.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="By default cuda if present.")
@click.option("--minutes", default=8.0, help="Time for all parts; under 3, one subject of each.")
@click.option("--only", default="", help="Parts, separated by commas; all by default.")
def main(out: Path, device: str | None, minutes: float, only: str) -> None:
    """Say what of autopar holds on this machine's accelerator: JSON, a page of HTML, and a screen.

    Started again with the same folder, it goes on with the parts that are not done. Exits with 1 if a
    part did not come to its end or a figure failed.
    """
    device = device or default_device()
    _set_environment(device)
    try:
        found = run(out, device, minutes, only)
    except AutoparError as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    console.print(summary(found))
    console.print(f"Wrote {out / 'page.html'}", soft_wrap=True, highlight=False)
    sys.exit(0 if all(result.passed for result in found) else 1)


if __name__ == "__main__":
    main()
