"""An hour of training on four ranks with a checkpoint each minute and a killed rank each five minutes.

    OMP_NUM_THREADS=1 nice -n 5 python -m benchmarks.soak.run --minutes 60
    python -m benchmarks.soak.report --markdown benchmarks/results/soak.md

The first command trains by `autopar run` and kills; the second compares the losses with those of an undisturbed run
of one process, and the memory of every rank after its warm-up with that at the end of its life.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.soak.samples import Life, lives_in

_ROOT = Path(__file__).parents[2]
_LATEST_SECONDS = 30.0  # that a kill comes after its time at most, drawn evenly
_END_SECONDS = 180.0  # that the ranks have for their last checkpoint and their end
_RANKS = 4


@dataclass(frozen=True)
class Kill:
    """A rank that was killed.

    Attributes:
        seconds: seconds since 1970.
        life: number of the life that it ended.
        rank: number of the rank.
        signal: name of the signal.
        launcher_bytes: resident memory of `autopar run` itself at that time.
    """

    seconds: float
    life: int
    rank: int
    signal: str
    launcher_bytes: int


def kills_of(
    begin_seconds: float, until_seconds: float, every_seconds: float, draw: random.Random
) -> Iterator[tuple[float, int, str]]:
    """Time, rank and signal of every kill: each `every_seconds`, and up to half a minute later.

    The last one leaves a whole `every_seconds` until the end.
    """
    late_seconds = min(_LATEST_SECONDS, every_seconds / 4)
    due_seconds = begin_seconds + every_seconds
    while due_seconds <= until_seconds - every_seconds:
        when = due_seconds + draw.uniform(0, late_seconds)
        yield when, draw.randrange(_RANKS), draw.choice(["SIGKILL", "SIGTERM"])
        due_seconds += every_seconds


def disturb(folder: Path, process: subprocess.Popen[bytes], due: Iterator[tuple[float, int, str]]) -> None:
    """Kills ranks of a run at their times, and writes what was killed."""
    for when, rank, name in due:
        while time.time() < when:
            if process.poll() is not None:
                return
            time.sleep(0.05)
        victim = _trains(folder, rank, process)
        if victim is None:
            return
        kill = Kill(time.time(), victim.number, rank, name, _resident_bytes(process.pid))
        os.kill(victim.pid, getattr(signal, name))
        with (folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(asdict(kill)) + "\n")
        print(f"{name} to rank {rank} of life {victim.number}", flush=True)


def _trains(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> Life | None:
    """The newest life of a rank, once it has made a step; None if the run ended."""
    killed = len(_lines(folder / "kills.jsonl"))
    while process.poll() is None:
        lives = [life for life in lives_in(folder) if life.rank == rank and life.samples]
        if lives and lives[-1].number >= killed:
            return lives[-1]
        time.sleep(0.2)
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process (proc(5): the second number of statm, in pages)."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=60.0, help="Minutes of training.")
@click.option("--kill-minutes", default=5.0, help="Minutes from one kill to the next.")
@click.option("--step-seconds", default=0.5, help="Seconds from one step to the next.")
@click.option("--save-steps", default=120, help="Steps from one checkpoint to the next.")
@click.option("--folder", default="runs/soak", type=click.Path(path_type=Path))
def main(minutes: float, kill_minutes: float, step_seconds: float, save_steps: int, folder: Path) -> None:
    """Train, and kill ranks meanwhile."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin_seconds = time.time()
    until_seconds = begin_seconds + 60 * minutes
    options = {
        "minutes": minutes,
        "kill_minutes": kill_minutes,
        "step_seconds": step_seconds,
        "save_steps": save_steps,
        "begin_seconds": begin_seconds,
    }
    (folder / "options.json").write_text(json.dumps(options))
    due = list(kills_of(begin_seconds, until_seconds, 60 * kill_minutes, random.Random(0)))
    command = [
        sys.executable,
        "-m",
        "autopar",
        "run",
        "--ranks",
        str(_RANKS),
        "--max-restarts",
        str(len(due) + 1),
        str(_ROOT / "benchmarks" / "soak" / "training.py"),
        "--folder",
        str(folder.resolve()),
        "--until",
        str(until_seconds),
        "--step-seconds",
        str(step_seconds),
        "--save-steps",
        str(save_steps),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(_ROOT)})
        try:
            disturb(folder, process, iter(due))
            code = process.wait(max(0.0, until_seconds - time.time()) + _END_SECONDS)
        finally:
            process.terminate()
            process.wait()
    (folder / "code").write_text(str(code))
    print(f"autopar run ended with {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()
