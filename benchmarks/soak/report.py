"""The page of the soak, from what `benchmarks.soak.run` left.

python -m benchmarks.soak.report --markdown benchmarks/results/soak.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.faults.training import TIMEOUT_SECONDS
from benchmarks.soak.run import Kill
from benchmarks.soak.samples import Drift, Life, between, drifts, lives_in
from benchmarks.soak.training import ROWS, SAMPLE_STEPS, WIDTH, undisturbed
from benchmarks.stored import write_whole
from benchmarks.tables import markdown_table

FLAT = 0.02  # the largest growth of a rank's memory, as a fraction (issue of the soak)
TOLERANCE = 1e-8  # relative; the largest difference of a loss in float64
CURVE = Path(__file__).parent / "memory.json"
_WARM_SAVES = 1.25  # a life is warm after its first checkpoint and a quarter of the way to the next


@dataclass(frozen=True)
class Soak:
    """What a soak left.

    Attributes:
        options: options of the command.
        lives: all lives of all ranks.
        kills: the kills, in order of time.
        losses: step and loss of every step, repeated ones included.
        code: exit code of `autopar run`.
    """

    options: dict[str, float]
    lives: tuple[Life, ...]
    kills: tuple[Kill, ...]
    losses: tuple[tuple[int, float], ...]
    code: int

    @classmethod
    def read(cls, folder: Path) -> Soak:
        """The soak of a folder."""
        lines = (folder / "losses").read_text().splitlines()
        return cls(
            json.loads((folder / "options.json").read_text()),
            tuple(lives_in(folder)),
            tuple(Kill(**json.loads(line)) for line in (folder / "kills.jsonl").read_text().splitlines()),
            tuple((int(step), float(loss)) for _, step, loss in map(str.split, lines)),
            int((folder / "code").read_text()),
        )

    @property
    def drifts(self) -> list[Drift]:
        """The drift of every life that lasted long enough."""
        return drifts(self.lives, round(_WARM_SAVES * self.options["save_steps"]))

    def of_life(self, number: int) -> list[Life]:
        """All ranks of a life."""
        return [life for life in self.lives if life.number == number]

    def minute(self, seconds: float) -> float:
        """Minutes from the start of the soak."""
        return (seconds - self.options["begin_seconds"]) / 60

    def restart_seconds(self, kill: Kill) -> float | None:
        """Seconds from a kill to the first step of the next life on the last rank; None if there is no such step."""
        samples = [life.samples for life in self.of_life(kill.life + 1)]
        if not samples or not all(samples):
            return None
        return max(own[0].seconds for own in samples) - kill.seconds

    @property
    def ended(self) -> list[int]:
        """Numbers of lives that ended without a kill, the last apart."""
        numbers = sorted({life.number for life in self.lives})
        return [n for n in numbers[:-1] if n not in {kill.life for kill in self.kills}]


def gap(losses: Sequence[tuple[int, float]], expected: Sequence[float]) -> float:
    """The largest relative difference of a loss, those of repeated steps included; infinite where one is missing.

    >>> gap([(1, 2.0), (2, 1.0), (2, 1.5)], [2.0, 1.0])
    0.5
    """
    if {step for step, _ in losses} != {*range(1, len(expected) + 1)}:
        return float("inf")
    return max(abs(loss / expected[step - 1] - 1) for step, loss in losses)


HEADS = (
    "life",
    "plan",
    "from minute",
    "to minute",
    "sampled steps",
    "MB after warm-up",
    "MB at the end",
    "largest growth of a rank, %",
    "tensors after warm-up",
    "tensors at the end",
    "killed",
    "s to the next first step",
)


def table(soak: Soak) -> list[str]:
    """A row for every life."""
    numbers = sorted({life.number for life in soak.lives})
    return markdown_table(HEADS, [_row(soak, number) for number in numbers], text_columns=2)


def _row(soak: Soak, number: int) -> tuple[str, ...]:
    first = soak.of_life(number)[0]
    own = [drift for drift in soak.drifts if drift.life.number == number]
    kills = [kill for kill in soak.kills if kill.life == number]
    seconds = soak.restart_seconds(kills[0]) if kills else None
    begin, end = first.samples[0], first.samples[-1]
    return (
        str(number + 1),
        first.plan,
        f"{soak.minute(begin.seconds):.1f}",
        f"{soak.minute(end.seconds):.1f}",
        f"{begin.step} to {end.step}",
        *_memory_cells(own),
        f"{kills[0].signal}, rank {kills[0].rank}" if kills else "by itself" if number in soak.ended else "",
        "" if seconds is None else f"{seconds:.0f}",
    )


def _memory_cells(own: list[Drift]) -> tuple[str, ...]:
    if not own:
        return ("too short",) * 5
    edges = [[d.begin for d in own], [d.end for d in own]]
    megabytes = [_range([sample.resident_bytes / 1e6 for sample in edge]) for edge in edges]
    tensors = [_range([sample.tensors for sample in edge]) for edge in edges]
    return (*megabytes, f"{100 * max(d.resident for d in own):+.2f}", *tensors)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


PAGE = """# Soak

Training for {minutes:g} minutes on four ranks, with a checkpoint each {save_steps:g} steps and a rank killed each
{kill_minutes:g} minutes, up to half a minute later. `autopar run` starts all ranks again from the last checkpoint.
Made by

    OMP_NUM_THREADS=1 nice -n 5 python -m benchmarks.soak.run --minutes {minutes:g}
    python -m benchmarks.soak.report --markdown benchmarks/results/soak.md

{figures}

![{label}](pictures/soak.svg)

## The setting

The model is an MLP of four layers of width {width} in float64 with AdamW, {rows} rows a batch, on Gloo ranks of one
machine. A step begins each {step_seconds:g} s, or later where the steps before it took longer, so that the ranks leave
most of the processor idle. Every life takes another plan, `ddp`, `zero3` and `pp=2 x dp=2` in turn, so that each
restart loads a checkpoint of another plan. A rank waits {timeout:g} s for another in a step; a longer wait ends the
life with a `PeerError`.

Every {sample} steps a rank writes its resident memory (`VmRSS` of proc(5)), the part that no file backs (`RssAnon`),
and the number of tensors that Python's garbage collector knows, those in cycles that wait for a collection included. A
life is warm {warm:g} steps after its first: by then it has written a checkpoint, whose copy on the host stays. The
median of the first three samples from there on is compared with that of the last three. Losses are compared with
those of one process without autopar, also those of repeated steps.

## Every life

"""


def figures(soak: Soak, expected: Sequence[float]) -> list[str]:
    """What was asked and what was found."""
    found, losses = soak.drifts, soak.losses
    survived = [s for kill in soak.kills if (s := soak.restart_seconds(kill)) is not None]
    launcher = [kill.launcher_bytes / 1e6 for kill in soak.kills]
    return markdown_table(
        ("figure", "found", "asked"),
        [
            (
                f"growth of a rank's resident memory from its warm-up to its end, the largest of {len(found)}",
                f"{100 * max(d.resident for d in found):+.2f} %",
                "2 %",
            ),
            ("the same of the part that no file backs", f"{100 * max(d.private for d in found):+.2f} %", ""),
            (
                "largest over smallest resident memory at the end of lives of the same rank and plan, less 1",
                f"{100 * between(found):.2f} %",
                "2 %",
            ),
            (
                f"largest relative difference of a loss: {len(expected)} steps, "
                f"of which {len(losses) - len(expected)} were repeated",
                f"{gap(losses, expected):.0e}",
                f"{TOLERANCE:.0e}",
            ),
            ("kills after which training went on", f"{len(survived)} of {len(soak.kills)}", "all"),
            ("lives that ended without a kill", str(len(soak.ended)), ""),
            (
                "seconds from a kill to the next first step, median and longest",
                f"{statistics.median(survived):.0f} and {max(survived):.0f}",
                "",
            ),
            (
                "resident memory of `autopar run` itself at the first and the last kill, MB",
                f"{launcher[0]:.1f} and {launcher[-1]:.1f}",
                "",
            ),
            ("exit code of `autopar run`", str(soak.code), "0"),
        ],
        text_columns=1,
    )


def page(soak: Soak, expected: Sequence[float]) -> str:
    """The page of the documentation."""
    options = soak.options
    head = PAGE.format(
        **options,
        width=WIDTH,
        rows=ROWS,
        sample=SAMPLE_STEPS,
        warm=_WARM_SAVES * options["save_steps"],
        figures="\n".join(figures(soak, expected)),
        timeout=TIMEOUT_SECONDS,
        label=curve(soak)["label"],
    )
    return head + "\n".join(table(soak)) + "\n"


def curve(soak: Soak) -> dict[str, Any]:
    """What the picture shows: by rank, for every life, minute and megabytes of every third sample."""
    lives = {
        f"rank {rank}": [
            [[round(soak.minute(s.seconds), 2), round(s.resident_bytes / 1e6, 1)] for s in life.samples[::3]]
            for life in soak.lives
            if life.rank == rank
        ]
        for rank in sorted({life.rank for life in soak.lives})
    }
    return {
        "label": f"Resident memory of four ranks over {soak.options['minutes']:g} minutes and {len(soak.kills)} kills",
        "megabytes": lives,
        "kills_minutes": [round(soak.minute(kill.seconds), 2) for kill in soak.kills],
    }


@click.command(context_settings={"show_default": True})
@click.option("--folder", default="runs/soak", type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path), help="Page to write.")
def main(folder: Path, markdown: Path | None) -> None:
    """Compare, and write the page."""
    soak = Soak.read(folder)
    expected = undisturbed(max(step for step, _ in soak.losses))
    text = page(soak, expected)
    print(text)
    if markdown is not None:
        markdown.write_text(text)
        write_whole(curve(soak), CURVE)
    found = soak.drifts
    good = max(d.resident for d in found) <= FLAT and between(found) <= FLAT
    sys.exit(not (good and gap(soak.losses, expected) <= TOLERANCE and soak.code == 0))


if __name__ == "__main__":
    main()
