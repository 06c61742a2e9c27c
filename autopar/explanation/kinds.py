"""Several kinds of machines in a cluster: the ways to share a step among them, and who waits for whom.

    equal shares          every rank does as much, and waits for the slowest kind
    a pipeline across     stages of different lengths, each on ranks of one kind where its ranks allow that
    kinds left out        the step on the other kinds alone

Each way is a request, answered by the same search as any other. The fastest is the answer, and the others are rows of
its comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.cost_model.breakdown import Candidate
from autopar.cost_model.machines.cluster import Cluster, cluster_of_kinds
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.kinds import ranks_of_kinds, stage_machines
from autopar.errors import AutoparError, first_line
from autopar.explanation.candidate_rows import idle, name_of, row_of, slower
from autopar.explanation.explanation import Explanation
from autopar.explanation.simulated import SimulatedStep
from autopar.pipeline.composed import composed
from autopar.search.request.request import Request
from autopar.units import counted, format_seconds

NOT_SEARCHED = (
    "Not searched: parts of the batch by kind (weighted data parallelism), some of the ranks of a kind, another order "
    "of the kinds, memory by kind (every rank is bounded by the smallest), and what would change the choice."
)


class Way(NamedTuple):
    """A way to share a step among kinds of machines.

    Attributes:
        words: the way in words, such as `h100x8x2 alone`.
        request: the request for its plan.
    """

    words: str
    request: Request


class TriedWay(NamedTuple):
    """The outcome of a way: its answer, or the error that says why there is none."""

    way: Way
    answer: Explanation | None
    error: AutoparError | None = None


def ways_of(request: Request, depths: Sequence[int]) -> list[Way]:
    """The ways to share a step among several kinds of machines.

    Args:
        request: a request for several kinds, whose mesh is open, with a known batch, which all ways share.
        depths: numbers of pipeline ranks to try on all ranks.
    """
    staged = tuple(each for each in depths if each > 1)
    found = [Way("equal shares", request.but(stages=(1,)))] if 1 in depths else []
    if staged:
        found.append(Way("a pipeline across", request.but(stages=staged)))
    for count in range(1, len(request.hardware.kinds)):
        for kept in itertools.combinations(request.cluster.kinds, count):
            alone = cluster_of_kinds(kept, between=request.hardware.between)
            found.append(Way(f"{alone} alone", request.but(hardware=alone.hardware, ranks=alone.ranks)))
    return found


def best_of(ways: Sequence[Way], answer: Callable[[Request], Explanation]) -> Explanation:
    """The fastest answer, with rows for the other ways, and sentences on who waits for whom.

    Args:
        ways: the ways.
        answer: function that answers a request; raises AutoparError if it finds no plan.

    Raises the error of the first way where no way has a plan.
    """
    found = [_tried(way, answer) for way in ways]
    able = [(each.way, each.answer) for each in found if each.answer is not None]
    if not able:
        raise next(each.error for each in found if each.error is not None)
    way, best = min(able, key=lambda each: each[1].step_seconds)
    rows = [_row(other, each, best) for other, each in able if other is not way]
    chosen, *others = best.candidates
    chosen = replace(chosen, name=f"{way.words}: {chosen.name}")
    lines = (_chosen_line(way, best, able), *waits(best), *_failures(found), NOT_SEARCHED)
    return best.but(candidates=(chosen, *rows, *others), kind_lines=lines)


def _tried(way: Way, answer: Callable[[Request], Explanation]) -> TriedWay:
    try:
        return TriedWay(way, answer(way.request))
    except AutoparError as error:  # such as a batch that some of the ranks cannot divide
        return TriedWay(way, None, error)


def _row(way: Way, found: Explanation, best: Explanation) -> Candidate:
    """The plan of another way as a row of the comparison."""
    name = f"{way.words}: {name_of(found.plan)}"
    binds = idle(found.simulation) if found.plan.pipeline is not None else ""
    row = row_of(found, name, binds, slower(found.step_seconds, best.step_seconds))
    return replace(row, chosen=False)


def _chosen_line(way: Way, best: Explanation, able: Sequence[tuple[Way, Explanation]]) -> str:
    others = "; ".join(
        f"{each.words} takes {format_seconds(found.step_seconds)}"
        for each, found in sorted(able, key=lambda pair: pair[1].step_seconds)
        if each is not way
    )
    beside = f"; {others}" if others else ""
    return f"Kinds of machines: {way.words} is fastest, {format_seconds(best.step_seconds)}{beside}."


def _failures(found: Sequence[TriedWay]) -> Iterator[str]:
    for each in found:
        if each.error is not None:
            yield f"Without a plan: {each.way.words} ({first_line(each.error)})"


# --- who waits for whom


def waits(found: Explanation) -> Iterator[str]:
    """Sentences on which ranks wait for which kind of machine, where the cluster has several."""
    kinds = found.cluster.kinds
    if len(kinds) < 2:
        return
    ranks = ranks_of_kinds(found.cluster.hardware)
    places = ", ".join(f"{_ranks(own)} {kind}" for own, kind in zip(ranks, kinds, strict=True))
    yield f"{places[0].upper()}{places[1:]}."
    run = found.simulated
    machines = stage_machines(found.cluster.hardware, found.plan.world_mesh)
    if run is None or len({*machines}) == 1:
        yield from _equal_lines(found, kinds)
    else:
        yield from _stage_lines(run, machines)


def _ranks(own: range) -> str:
    return f"ranks {own.start} to {own.stop - 1} are" if len(own) > 1 else f"rank {own.start} is"


def _equal_lines(found: Explanation, kinds: Sequence[Cluster]) -> Iterator[str]:
    """How long each kind would take for the share that every rank has."""
    software, state = found.software, found.run.training_state
    prices = [
        (kind, composed(found.graph, found.plan, kind.hardware, software=software, training_state=state).step_seconds)
        for kind in kinds
    ]
    slow, _ = max(prices, key=lambda each: each[1])
    for kind, seconds in prices:
        if kind is not slow and seconds < found.step_seconds:
            waiting = 100 * (1 - seconds / found.step_seconds)
            yield (
                f"All ranks have equal shares and wait for {slow.hardware.name}: on {kind.hardware.name} alone the "
                f"same share takes {format_seconds(seconds)} of {format_seconds(found.step_seconds)}, so that it waits "
                f"{waiting:.0f} % of a step."
            )


def _stage_lines(run: SimulatedStep, machines: Sequence[Hardware]) -> Iterator[str]:
    """What the stages of every kind have, and how long their ranks wait."""
    busiest = machines[run.busiest_rank]
    for kind in dict.fromkeys(machines):
        ranks = [rank for rank, machine in enumerate(machines) if machine == kind]
        rows = [run.stages[stage] for rank in ranks for stage in run.pipeline.stages_of(rank)]
        seconds = sum(row.forward_seconds + row.backward_seconds for row in rows) / len(ranks)
        busy_seconds = sum(run.simulation.busy_seconds[rank] for rank in ranks) / len(ranks)
        waiting = f"{100 * (1 - busy_seconds / run.simulation.step_seconds):.0f} % of the schedule"
        others = "for other stages" if kind == busiest else f"for {busiest.name}, which computes longest"
        yield (
            f"Pipeline {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} on {kind.name}: "
            f"{counted(sum(row.layers for row in rows), 'layer')} in {counted(len(rows), 'stage')}, "
            f"{format_seconds(seconds)} of a rank for a micro-batch; waits {waiting} {others}."
        )
