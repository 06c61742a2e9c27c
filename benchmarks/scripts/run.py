"""Runs a public training script as it is and on two Gloo ranks under autopar, and prints how its losses compare.

OMP_NUM_THREADS=1 python benchmarks/scripts/run.py FOLDER nanoGPT --recipe ddp --recipe zero3

FOLDER has the repository and its data (`benchmarks/results/scripts.md`). It is copied, and the copy is changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import click

RANKS = 2
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A script.

    Args:
        source: owner and name of its repository.
        script: path of the script in it.
        arguments: the command line.
        lines: replacements for autopar: path, old text, new text.
        both: replacements of the plain run and of autopar's.
        folder: the working folder in the repository.
        paths: folders of the repository to import from.
        environment: environment variables.
        losses: number of losses in five steps.
        rows: what ROWS in the command line stands for in one process, where each rank of autopar reads its part.
        plain_ranks: ranks of the plain run; two for a script of DistributedDataParallel that draws noise on each rank.
    """

    source: str
    script: str
    arguments: str
    lines: list[list[str]]
    both: list[list[str]] = field(default_factory=list)
    folder: str = "."
    paths: list[str] = field(default_factory=lambda: ["."])
    environment: dict[str, str] = field(default_factory=dict)
    losses: int = 5
    rows: int = 0
    plain_ranks: int = 1


CASES = {name: Case(**each) for name, each in tomllib.loads((_HERE / "cases.toml").read_text()).items()}


@dataclass(frozen=True)
class Run:
    """The losses of every rank, and seconds to the first update; for a run that failed its last words."""

    losses: list[list[float]]
    seconds: float
    words: str


def run(case: Case, source: Path, recipe: str, timeout: float) -> Run:
    """Copies the repository, changes the copy and runs the script there, plainly if `recipe` is empty."""
    ranks = RANKS if recipe else case.plain_ranks
    with tempfile.TemporaryDirectory() as scratch:
        folder, log = Path(scratch) / "copy", Path(scratch) / "log"
        shutil.copytree(source, folder, symlinks=True)
        for path, old, new in [*case.both, *(case.lines if recipe else [])]:
            replace(folder / path, old, new.replace("RECIPE", recipe))
        rows = str(case.rows // RANKS if recipe else case.rows)
        arguments = [word.replace("ROWS", rows) for word in case.arguments.split()]
        record = [
            str(_HERE / "record.py"),
            f"{scratch}/losses",
            str(case.losses),
            str(folder / case.script),
            *arguments,
        ]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        paths = [str(folder / path) for path in case.paths] + [os.environ.get("PYTHONPATH", "")]
        own = {**case.environment, "PYTHONPATH": os.pathsep.join(paths), "STARTED": str(time.time())}
        command = [sys.executable, *(launch if ranks > 1 else []), *record]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=folder / case.folder, env={**os.environ, **own}, stdout=file, stderr=file
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        words = log.read_text().partition("torch/distributed/elastic/")[0]  # without those of the launcher
        found = [Path(f"{scratch}/losses.{rank}") for rank in range(ranks)]
        if not all(path.exists() for path in found):
            return Run([], float("nan"), words[-3000:])
        results = [json.loads(path.read_text()) for path in found]
        said = "\n".join(line for line in words.splitlines() if "autopar: " in line)
        return Run([result["losses"] for result in results], results[0]["seconds"], said)


def replace(path: Path, old: str, new: str) -> None:
    """Replaces a text that a file has once."""
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{path} has {text.count(old)} times, and should have once: {old}")
    path.write_text(text.replace(old, new))


def difference(ours: Run, plain: Run) -> float:
    """The largest relative difference of losses; a rank is compared with the same rank, or with the one process."""
    pairs = ((losses, plain.losses[rank % len(plain.losses)]) for rank, losses in enumerate(ours.losses))
    return max((abs(x - y) / abs(y) for a, b in pairs for x, y in zip(a, b, strict=True)), default=float("nan"))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("name", type=click.Choice(list(CASES)))
@click.option("--recipe", multiple=True, help="Recipes to run.")
@click.option("--timeout", default=400.0, help="Seconds for a run.")
def main(folder: Path, name: str, recipe: tuple[str, ...], timeout: float) -> None:
    """Runs one script plainly and under recipes, and prints a row of the table."""
    case = CASES[name]
    plain = run(case, folder, "", timeout)
    click.echo(f"plain losses: {plain.losses}\n{plain.words}")
    cells = [f"{plain.seconds:.1f}"]
    for each in recipe if plain.losses else ():
        ours = run(case, folder, each, timeout)
        click.echo(f"{each} losses: {ours.losses[:1]}\n{ours.words}")
        cells += [f"{ours.seconds:.1f}", f"{difference(ours, plain):.0e}"]
    click.echo(f"| {' | '.join([name, case.source, str(len(case.lines)), *cells])} |")


if __name__ == "__main__":
    main()
