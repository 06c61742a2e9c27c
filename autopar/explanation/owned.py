"""Sentences about a plan in which single ranks run ops: who runs what, how long it works, and for whom it waits."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_model.steps.owned_step import OwnedStep, Position
from autopar.ir import Graph, Mesh, Plan, owner_of
from autopar.units import format_seconds

_SHOWN = 3  # modules that a sentence names


def owner_sentences(graph: Graph, plan: Plan, step: OwnedStep) -> tuple[str, ...]:
    """A sentence for every rank that runs ops alone, and one for every rank that waits."""
    return (*_runs(graph, plan), *_waits(plan.mesh, step))


def _runs(graph: Graph, plan: Plan) -> Iterator[str]:
    for axis, (name, size) in enumerate(plan.mesh.axes):
        for rank in range(size):
            own = [op for op in graph.ops if owner_of(plan.ops[op.name][axis]) == rank]
            if own:
                modules = list(dict.fromkeys(op.module.partition(".")[0] or op.name for op in own))
                rest = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
                where = f"{', '.join(modules[:_SHOWN])}{rest}"
                count = f"{len(own)} of {len(graph.ops)} ops alone"
                yield f"rank {rank} of {name} runs {count} ({where})"


def _waits(mesh: Mesh, step: OwnedStep) -> Iterator[str]:
    schedule, times = step.schedule, float(step.run.micro_batches)
    for rank, busy in schedule.busy_seconds.items():
        waited = {other: seconds for (one, other), seconds in schedule.waits_seconds.items() if one == rank}
        words = f"{_name(mesh, rank)} works for {format_seconds(times * busy)} of a step"
        for other, seconds in sorted(waited.items(), key=lambda pair: -pair[1])[:_SHOWN]:
            words += f", waits {format_seconds(times * seconds)} for {_name(mesh, other)}"
        yield words


def _name(mesh: Mesh, position: Position) -> str:
    axes = zip(mesh.names, mesh.sizes, position, strict=True)
    return "rank " + " ".join(f"{place} of {name}" for name, size, place in axes if size > 1)
