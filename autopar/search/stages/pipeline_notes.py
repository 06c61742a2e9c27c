"""The notes of a plan with pipeline stages: what was chosen, and what came second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir import Pipeline
from autopar.ir.note import Note
from autopar.ir.recompute import format_recompute, words_of_recompute
from autopar.search.stages.pipeline_settings import Priced
from autopar.units import counted, format_bytes


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
