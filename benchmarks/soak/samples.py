"""What the ranks of the soak wrote, life by life, and how far their memory moved."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

EDGE = 3  # samples whose median stands for the begin or the end of a life


@dataclass(frozen=True)
class Sample:
    """What a process holds at one moment.

    Attributes:
        seconds: seconds since 1970.
        step: number of the step that has just been made.
        resident_bytes: memory that lies in RAM, that of libraries included.
        private_bytes: the part of it that no file backs: heap, tensors, stacks.
        tensors: number of tensors that Python's garbage collector knows.
        files: number of open file descriptors.
        threads: number of threads.
    """

    seconds: float
    step: int
    resident_bytes: int
    private_bytes: int
    tensors: int
    files: int
    threads: int


@dataclass(frozen=True)
class Life:
    """One rank from a start to the next death.

    Attributes:
        rank: number of the rank.
        number: number of the life, from 0.
        pid: process id.
        plan: plan that the ranks trained under.
        samples: what it held, in order of time.
    """

    rank: int
    number: int
    pid: int
    plan: str
    samples: tuple[Sample, ...]

    def settled(self, warm_steps: int) -> tuple[Sample, ...]:
        """The samples after the first `warm_steps` steps of this life."""
        return tuple(s for s in self.samples if s.step >= self.samples[0].step + warm_steps)


@dataclass(frozen=True)
class Drift:
    """How far the memory of a rank moved within one life, from after its warm-up to its end.

    Attributes:
        life: the life.
        begin: what it held after the warm-up: medians of the first samples.
        end: what it held at last: medians of the last samples.
    """

    life: Life
    begin: Sample
    end: Sample

    @property
    def resident(self) -> float:
        """Growth of the resident memory, as a fraction of it; negative if it shrank."""
        return self.end.resident_bytes / self.begin.resident_bytes - 1

    @property
    def private(self) -> float:
        """Growth of the private memory, as a fraction of it."""
        return self.end.private_bytes / self.begin.private_bytes - 1


def lives_in(folder: Path) -> list[Life]:
    """All lives of all ranks, in order of life and rank."""
    found = []
    for path in folder.glob("rank-*.life-*.jsonl"):
        numbers = re.fullmatch(r"rank-(\d+)\.life-(\d+)\.jsonl", path.name)
        assert numbers is not None, path
        # A rank that is killed while it writes leaves a line without its end.
        lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        if lines:
            head = json.loads(lines[0])
            samples = tuple(Sample(**json.loads(line)) for line in lines[1:])
            found.append(Life(int(numbers[1]), int(numbers[2]), head["pid"], head["plan"], samples))
    return sorted(found, key=lambda life: (life.number, life.rank))


def middle(samples: Sequence[Sample]) -> Sample:
    """The median of every number.

    >>> middle([Sample(1, 1, 10, 5, 7, 3, 2), Sample(2, 2, 30, 5, 7, 3, 2), Sample(3, 3, 20, 6, 9, 3, 2)])
    Sample(seconds=2, step=2, resident_bytes=20, private_bytes=5, tensors=7, files=3, threads=2)
    """
    columns = zip(*(vars(sample).values() for sample in samples), strict=True)
    return Sample(*map(statistics.median_low, columns))


def drifts(lives: Iterable[Life], warm_steps: int) -> list[Drift]:
    """The drift of every life that lasted long enough for a begin and an end that share no sample."""
    found = []
    for life in lives:
        settled = life.settled(warm_steps) if life.samples else ()
        if len(settled) >= 2 * EDGE:
            found.append(Drift(life, middle(settled[:EDGE]), middle(settled[-EDGE:])))
    return found


def between(found: Iterable[Drift]) -> float:
    """Largest over smallest resident memory at the end of lives of the same rank and plan, less 1; the worst of all."""
    ends: dict[tuple[int, str], list[int]] = {}
    for drift in found:
        ends.setdefault((drift.life.rank, drift.life.plan), []).append(drift.end.resident_bytes)
    return max((max(each) / min(each) - 1 for each in ends.values()), default=0.0)
