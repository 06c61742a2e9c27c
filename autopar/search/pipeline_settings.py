"""Ways to run a pipeline: which are searched, and what a search finds of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.ir import PLACEMENTS, Plan
from autopar.ir.recompute import Recompute, words_of_recompute
from autopar.pipeline.simulation import Simulation
from autopar.search.balance import Balance
from autopar.search.request import Request
from autopar.search.shape import Shape
from autopar.units import counted

# What is searched where nobody says. A backward in two halves is priced as if it cost nothing more than
# a whole one, and torch walks the graph twice for it, so the zero-bubble schedules run only by name.
SEARCHED_SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs")
# Of schedules that run stages in rounds, besides what divides a rank's layers.
_SEARCHED_CHUNKS = (2, 4)


@dataclass(frozen=True)
class Setting:
    """One way to run a pipeline.

    Attributes:
        shape: ranks, chunks, schedule and micro-batches.
        recompute: the blocks or ops that are recomputed in backward.
    """

    shape: Shape
    recompute: Recompute

    def __str__(self) -> str:
        s = self.shape
        chunks = f" of {s.chunks} chunks" if s.chunks > 1 else ""
        again = f", {words}" if (words := words_of_recompute(self.recompute)) else ""
        return f"{s.schedule}{chunks}, {counted(s.micro_batches, 'micro-batch')}{again}"


class KeptWhole(NamedTuple):
    """Seconds of a step, and bytes of the fullest rank."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Priced:
    """A setting with a plan for it, and what it takes.

    Attributes:
        setting: the priced setting.
        plan: with its cuts.
        seconds: duration of a step.
        simulation: the schedule as it runs.
        balance: the cuts.
        share: fraction of the memory of all stages under which the layouts were searched.
        kept_whole: figures of the same setting without recomputation; None where it has none.
    """

    setting: Setting
    plan: Plan
    seconds: float
    simulation: Simulation
    balance: Balance
    share: float
    kept_whole: KeptWhole | None = None

    @property
    def key(self) -> tuple[float, float]:
        """Smaller is better: time, then memory; times that differ by rounding alone are equal."""
        return float(f"{self.seconds:.9g}"), max(self.balance.rank_bytes)


@dataclass(frozen=True)
class PipelineFound:
    """The best plan.

    Attributes:
        best: it, with its figures.
        others: the best of every other setting that was priced and fits, fastest first.
        refused: setting -> why it has no plan.
    """

    best: Priced
    others: tuple[Priced, ...]
    refused: Mapping[str, str]

    @property
    def plan(self) -> Plan:
        return self.best.plan


def searched_chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Numbers of stages of a rank, of schedules that run them in rounds, that are searched where nobody says.

    Two, four, and those that divide the blocks of a rank; most first, since the bubble gets shorter by them.

    Args:
        blocks: number of blocks of the model.
        ranks: number of pipeline ranks.

    Example:
        >>> searched_chunks(blocks=96, ranks=8)
        (12, 6, 4, 3, 2)
    """
    each = round(blocks / ranks)
    found = {*divisors(each), *_SEARCHED_CHUNKS} - {1}
    return tuple(sorted((n for n in found if n * ranks <= blocks), reverse=True))


def divisors(n: int) -> list[int]:
    """The numbers that divide a number, ascending.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, n + 1) if n % d == 0]


def shapes_of(request: Request, ranks: int, micro_batches: int, blocks: int) -> Iterator[Shape]:
    """Every schedule with every number of chunks that it can have; on one rank all are the same."""
    chosen = request.chosen_schedule
    schedules = (chosen,) if chosen else SEARCHED_SCHEDULES
    for schedule in schedules if ranks > 1 else schedules[:1]:
        for chunks in _chunks(request, schedule, ranks, blocks):
            yield Shape(ranks, chunks, schedule, micro_batches)


def _chunks(request: Request, schedule: str, ranks: int, blocks: int) -> tuple[int, ...]:
    kind, is_chosen = PLACEMENTS[schedule], request.chosen_schedule is not None
    if request.chunks is not None:
        # With one stage a rank the interleaved schedules that are searched are 1f1b and gpipe.
        has_it = request.chunks > 1 if kind == "rounds" else request.chunks == _FIXED[kind]
        return (request.chunks,) if is_chosen or has_it else ()
    if kind in _FIXED:
        return (_FIXED[kind],) if ranks > 1 or kind == "one" or is_chosen else ()
    searched = searched_chunks(blocks, ranks)
    return (1, *searched) if is_chosen else searched if ranks > 1 else ()


_FIXED = {"one": 1, "v": 2}  # kind of a schedule -> the stages that each of its ranks has
