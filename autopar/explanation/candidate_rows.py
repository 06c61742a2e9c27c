"""Words for plans and rows of candidates in an answer to a question."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_model.breakdown import Candidate
from autopar.cost_model.steps.causes import where_time_goes
from autopar.cost_model.steps.step import Step
from autopar.explanation.explanation import Explanation
from autopar.ir import Plan
from autopar.ir.note import kind_of
from autopar.pipeline.simulation import Simulation
from autopar.search.candidates.settings import words_of

AS_FAST = 5e-5  # difference of two steps, as a part of one, that is not told

_KEPT_NOTES = (
    "axes",
    "repeated",
    "uneven",
    "runner-up",
    "tiers",
    "owners",
    "replicas",
    "versions",
    "decomposed",
    "overlap",
    "micro-batches",
    "buckets",
)


def kept_notes(plan: Plan) -> Iterator[str]:
    """The search's notes that an answer keeps (next best plan, tiers, replicas and so on); it writes others itself."""
    return (note for note in plan.notes if kind_of(note) in _KEPT_NOTES)


def name_of(plan: Plan) -> str:
    """Axes, recipe, schedule, micro-batches and recomputation of a plan in a few words."""
    pipeline = plan.pipeline
    chunks = f" of {pipeline.chunks} chunks" if pipeline is not None and pipeline.chunks > 1 else ""
    schedule = "" if pipeline is None else f"{pipeline.schedule}{chunks}"
    return words_of(plan.world_mesh, plan.recipe, schedule, plan.micro_batches, plan.kept_words)


def idle(simulation: Simulation | None) -> str:
    """Words such as `bubble 11.1 %`."""
    assert simulation is not None, "a plan with stages is simulated"
    return f"bubble {100 * simulation.bubble_fraction:.1f} %"


def slower(seconds: float, best_seconds: float, alike: float = AS_FAST) -> str:
    """Words such as `3.5 % slower`, or `as fast` for a difference below `alike`, as a part of a step."""
    change = seconds / best_seconds - 1
    if abs(change) < alike:
        return "as fast"
    return f"{100 * abs(change):.1f} % {'slower' if change > 0 else 'faster'}"


def row_of(found: Explanation, name: str, binds: str, why_not: str) -> Candidate:
    return Candidate(
        name,
        found.step_seconds,
        found.memory_bytes,
        found.traffic.value,
        binds or largest_cause(found.step),
        found.fits,
        True,
        why_not,
    )


def largest_cause(step: Step) -> str:
    causes = seconds_by_cause(step)
    return max(causes, key=lambda name: causes[name])


def seconds_by_cause(step: Step) -> dict[str, float]:
    """The seconds of a step by what they are spent on; they add up to the step."""
    return {name: float(seconds) for name, seconds in where_time_goes(step).items()}
