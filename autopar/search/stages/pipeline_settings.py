"""Settings of a pipeline (schedule, chunks, micro-batches, recomputation): what is searched, prices and notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import PLACEMENTS, Pipeline, Plan
from autopar.ir.note import Note
from autopar.ir.recompute import Recompute, RecomputeOption, format_recompute, words_of_recompute
from autopar.pipeline.simulation import Simulation
from autopar.search.request.request import Request
from autopar.search.stages.balance import Balance
from autopar.search.stages.shape import Shape
from autopar.units import counted, format_bytes

# Schedules to search if the user names none.
SEARCHED_SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs")
# Schedules to search besides, if backward can run in two halves.
ZERO_BUBBLE = ("zb", "zbv", "dualpipev")
# Schedules to search besides where others do not fit into memory without recomputation: they hold half and a third of
# the activations of 1f1b, and idle longer.
LEAN = ("v-half", "v-min")
# Numbers of chunks to search for schedules that run stages in rounds, in addition to divisors of a rank's blocks.
_SEARCHED_CHUNKS = (2, 3, 4, 6)


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
        again = f", {words}" if (words := words_of_recompute(self.recompute, s.stages)) else ""
        return f"{s.schedule}{chunks}, {counted(s.micro_batches, 'micro-batch')}{again}"


@dataclass(frozen=True)
class Priced:
    """A setting with its plan, time and memory.

    Attributes:
        setting: the priced setting.
        plan: the plan, cut into stages.
        seconds: duration of a step.
        simulation: the simulated schedule.
        balance: the cuts, with seconds and bytes of every rank.
    """

    setting: Setting
    plan: Plan
    seconds: float
    simulation: Simulation
    balance: Balance

    @property
    def key(self) -> tuple[float, float]:
        """Sort key, smaller is better: seconds to nine digits, then bytes of the fullest rank."""
        return float(f"{self.seconds:.9g}"), max(self.balance.rank_bytes)


@dataclass(frozen=True)
class PipelineFound:
    """The result of a search for a pipeline.

    Attributes:
        best: the best plan with its figures.
        others: the other settings that fit, fastest first.
    """

    best: Priced
    others: tuple[Priced, ...]

    @property
    def plan(self) -> Plan:
        return self.best.plan


def searched_chunks(blocks: int, ranks: int) -> tuple[int, ...]:
    """Numbers of stages per rank to search for interleaved schedules: 2, 3, 4, 6, and the divisors of a rank's blocks.

    Stages may have different numbers of blocks: six stages a rank are 0.8 % faster than four for Llama-3 8B in
    `pp=2,dp=8`, where a rank has 17 blocks, a prime number.

    Larger numbers come first, because they make the bubble shorter.

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
    """The divisors of a number, in ascending order.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def shapes_of(request: Request, ranks: int, micro_batches: int, blocks: int) -> Iterator[Shape]:
    """Every schedule to search with every number of chunks, `LEAN` last; on one pipeline rank only the first one."""
    chosen = request.chosen_schedule
    searched = SEARCHED_SCHEDULES + ((*ZERO_BUBBLE, *LEAN) if request.splits_backward else ())
    schedules = (chosen,) if chosen else searched
    for schedule in schedules if ranks > 1 else schedules[:1]:
        for chunks in _chunks(request, schedule, ranks, blocks):
            yield Shape(ranks, chunks, schedule, micro_batches)


def _chunks(request: Request, schedule: str, ranks: int, blocks: int) -> tuple[int, ...]:
    kind, is_chosen = PLACEMENTS[schedule], request.chosen_schedule is not None
    takes_one = is_chosen or schedule not in _SAME_WITH_ONE_STAGE
    if request.chunks is not None:
        has_it = request.chunks > 1 or takes_one if kind == "rounds" else request.chunks == _FIXED[kind]
        return (request.chunks,) if is_chosen or has_it else ()
    if kind in _FIXED:
        return (_FIXED[kind],) if ranks > 1 or kind == "one" or is_chosen else ()
    several = searched_chunks(blocks, ranks) if ranks > 1 or is_chosen else ()
    return (1, *several) if takes_one and (ranks > 1 or is_chosen) else several


def wish_for(request: Request, shape: Shape, wish: RecomputeOption | None) -> RecomputeOption | None:
    """The recomputation to search with a shape; none with a schedule that the search proposes only without it.

    Stages that recompute run their backward whole. With several stages per rank, `zb` is then much like `interleaved`
    (and `dualpipev` like `zbv`), and the search for the fewest blocks that fit would take as long again. `LEAN` is
    searched to do without.
    """
    is_alike = shape.schedule in ("dualpipev", *LEAN) or (shape.schedule == "zb" and shape.chunks > 1)
    return "none" if wish is None and is_alike and request.chosen_schedule is None else wish


# Schedules that are another one of those to search, 1f1b or gpipe, if each rank has one stage.
_SAME_WITH_ONE_STAGE = ("interleaved", "looped-bfs")
_FIXED = {"one": 1, "v": 2}  # kind of a schedule -> the stages that each of its ranks has


def notes_of(best: Priced, kept: Priced | None, others: Sequence[Priced]) -> Iterator[str]:
    """The notes on the chosen setting, its time and memory, its recomputation, and the second best one.

    `kept` is the setting without its recomputation, if it has some.
    """
    pipeline = best.plan.pipeline
    assert pipeline is not None, "a priced plan has its cuts"
    held = ", ".join(format_bytes(int(size)) for size in best.balance.rank_bytes)
    if pipeline.ranks > 1:
        cuts = f"stages begin at {_cuts(pipeline)}"
        yield Note(f"pipeline of {pipeline.ranks} ranks: {best.setting}; {cuts}", "stages")
        what = "predicted step of the pipeline"
        share = best.simulation.bubble_fraction
        idle = f"; ranks idle {100 * share:.1f} % of the schedule, and hold {held}"
    else:
        again = f", {words}" if (words := words_of_recompute(best.plan.recompute, pipeline.stages)) else ""
        what, idle = (
            "predicted step",
            f"; a rank holds {held} with {counted(best.plan.micro_batches, 'micro-batch')}{again}",
        )
    yield Note(f"{what} {best.seconds * 1e3:.3f} ms{idle}", "stages")
    if kept is not None:
        yield _against_kept(best, kept)
    second = next((each for each in others if each.setting != best.setting), None)
    if second is not None and pipeline.ranks > 1:
        words = f"{second.setting}, {_against(second, best)}"
        yield Note(f"next best, of {len(others)} others that fit: {words}", "runner-up")


def _against_kept(best: Priced, kept: Priced) -> str:
    saved = int(max(kept.balance.rank_bytes) - max(best.balance.rank_bytes))
    slower = 1e3 * (best.seconds - kept.seconds)
    return (
        f"recompute {format_recompute(best.plan.recompute)}: {format_bytes(saved)} less on the fullest rank "
        f"for {slower:.3f} ms more a step than with these cuts and no recomputation"
    )


def _against(second: Priced, best: Priced) -> str:
    if second.key[0] > best.key[0]:
        return f"{100 * (second.seconds / best.seconds - 1):.1f} % slower"
    more = max(second.balance.rank_bytes) - max(best.balance.rank_bytes)
    return f"as fast, with {format_bytes(int(more))} more on the fullest rank"


def _cuts(pipeline: Pipeline) -> str:
    return ", ".join(("the first op", *pipeline.cuts))
