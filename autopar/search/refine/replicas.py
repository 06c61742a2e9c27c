"""Training that is not that of a single device: replicas that meet, and schedules that update without a flush.

Replicas train separate copies of the model on their own rows, and exchange parameters every K steps: a meeting
(`autopar.ir.meeting`). All replicas run the same plan, which the search makes for the mesh of one replica. A schedule
without a flush keeps versions of parameters (`autopar.pipeline.weight_stashing`), of which a note tells the effect on
training, time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.cost_model.items import TrainingState
from autopar.cost_model.steps.step import Step
from autopar.ir import Graph, Meeting, Pipeline
from autopar.ir.meeting import SERVER
from autopar.ir.note import Note
from autopar.pipeline.composed import composed, step_of
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.weight_stashing import WeightVersions
from autopar.search.request.recipe_rows import RecipeLike
from autopar.search.request.recipes import format_recipe
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import counted, format_bytes, format_seconds


def with_meeting(found: Planned, request: Request) -> Planned:
    """The plan of one replica with meetings added: their times, their cost, and a note for the user.

    A request without replicas gives back the plan as it was found.
    """
    meeting = request.meeting
    if meeting is None:
        return found
    plan = replace(found.plan, meeting=meeting, recipe=_whole_recipe(meeting, request.recipe))
    every_step = replace(plan, meeting=Meeting(meeting.axis, meeting.replicas, 1))
    step, together = (step_of(found.graph, each, **request.figures) for each in (plan, every_step))
    note = Note(_sentence(found.graph, meeting, step, together), "replicas")
    return found._replace(plan=plan, price=composed(found.graph, plan, **request.figures)).noted(note)


def _whole_recipe(meeting: Meeting, inside: RecipeLike) -> str:
    """The recipe of all axes: that of the axis of the replicas, and the recipe of the axes inside a replica."""
    others = dict(inside) if isinstance(inside, Mapping) else {}
    return format_recipe({meeting.axis: meeting.recipe, **others})


def _sentence(graph: Graph, meeting: Meeting, step: Step, together: Step) -> str:
    """Text of the note: why the result is not that of a single device, and how many bytes and seconds a step saves.

    Args:
        graph: the captured model.
        meeting: the replicas.
        step: a step of the plan.
        together: a step in which replicas send their parameters once, as data parallelism sends gradients.
    """
    own, whole = _sent(meeting, step), _sent(meeting, together, graph)
    if meeting.rule == SERVER:
        return _sentence_of_server(meeting, own, whole)
    steps = meeting.oldest_steps
    older = f"up to {counted(steps, 'step')} old" if steps else "never old"
    size_words = f"{format_bytes(own.size_bytes)} a step in place of {format_bytes(whole.size_bytes)}"
    seconds_words = f"{format_seconds(own.seconds)} in place of {format_seconds(whole.seconds)}"
    return (
        f"Not the result of a single device: {counted(meeting.replicas, 'replica')} along {meeting.axis} train on rows "
        f"of their own and synchronise {meeting}. The parameters of other replicas that one sees are {older}. Along "
        f"{meeting.axis} a rank sends {size_words} with data parallelism, in about {seconds_words}."
    )


def _sentence_of_server(meeting: Meeting, own: _Sent, whole: _Sent) -> str:
    """The same of replicas that exchange with an asynchronous server."""
    axis, steps, ahead = meeting.axis, meeting.oldest_steps, meeting.staleness
    older = f"a gradient may lack up to the last {counted(steps, 'step')} of each other rank, by its own count"
    waits = "for the slowest in every exchange"
    if ahead:
        waits = f"for another only where it is more than {counted(ahead, 'exchange')} ahead of it"
    return (
        f"Not the result of a single device: {counted(meeting.replicas, 'replica')} along {axis} train on rows of "
        f"their own and exchange differences with a server on O({meeting.owner})@{axis} after "
        f"{_every(meeting.steps)}, so that {older if steps else 'no gradient is old'}. A rank waits {waits}. "
        f"Along {axis} the server's rank sends {format_bytes(own.size_bytes)} a step in place of "
        f"{format_bytes(whole.size_bytes)} with data parallelism, in about {format_seconds(own.seconds)} if all "
        f"exchange at once, in place of {format_seconds(whole.seconds)}."
    )


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


class _Sent(NamedTuple):
    """Bytes that a rank sends to other replicas in a step, and the seconds that takes."""

    size_bytes: float
    seconds: float


def _sent(meeting: Meeting, step: Step, gradients_of: Graph | None = None) -> _Sent:
    """The traffic along the axis of the replicas; of gradients instead of parameters if a graph is given."""
    items = [i for i in step.items if i.phase == "meet" and i.resource == meeting.axis]
    state = step.run.training_state
    scales = [1.0 if gradients_of is None else _gradient_scale(gradients_of, i.of, state) for i in items]
    pairs = list(zip(items, scales, strict=True))
    return _Sent(
        sum(float(i.count * i.traffic_bytes) * scale for i, scale in pairs),
        sum(float(i.count * i.seconds) * scale for i, scale in pairs),
    )


def _gradient_scale(graph: Graph, name: str, state: TrainingState) -> float:
    """Bytes of a parameter's gradient, which data parallelism would send, for each byte of the stored parameter."""
    tensor = graph.tensors[graph.parameters[name]]
    own = state.gradient_bytes or tensor.gradient_scale * tensor.itemsize_bytes
    return own / tensor.at_rest.itemsize_bytes


def with_delays(found: Planned, request: Request) -> Planned:
    """The plan with this note; unchanged if its schedule updates only at the end of a step."""
    pipeline = found.plan.pipeline
    if pipeline is None or not pipeline.update_every:
        return found
    step = ExecutedStep(found.graph, found.plan, request.hardware, request.training_state, request.software)
    return found.noted(Note(_sentence_of_versions(step, pipeline), "versions"))


def _sentence_of_versions(step: ExecutedStep, pipeline: Pipeline) -> str:
    versions = WeightVersions(pipeline, step.plan.micro_batches)
    flushed = _flushed(step, pipeline)
    every = pipeline.update_every
    after = "each micro-batch" if every == 1 else f"every {every} micro-batches"
    further = [(count - 1) * cost.version_bytes for count, cost in zip(versions.alive, step.costs, strict=True)]
    times = counted(versions.updates, "time")
    flushed_seconds = versions.updates * flushed.seconds
    return (
        f"Not the result of a single device: under {pipeline.schedule} every stage updates its parameters after "
        f"{after}, {times} a step, without waiting for the others; {_age(versions)}. A step takes about "
        f"{format_seconds(step.seconds)} in place of {format_seconds(flushed_seconds)} with a flush at every update, "
        f"and tensors of the fullest rank {_peak(step)} in place of {_peak(flushed)}, of which older versions are up "
        f"to {format_bytes(max(further))}."
    )


def _peak(step: ExecutedStep) -> str:
    return format_bytes(max(step.simulation.peak_bytes))


def _age(versions: WeightVersions) -> str:
    """Words for the age of gradients: how many updates their parameters have had between forward and update."""
    oldest, newest = max(versions.delays), min(versions.delays)
    if oldest == newest:
        return f"a gradient is up to {counted(oldest, 'update')} old"
    stage = versions.delays.index(oldest)
    return f"a gradient is up to {counted(oldest, 'update')} old on stage {stage}, and {newest} on the last"


def _flushed(step: ExecutedStep, pipeline: Pipeline) -> ExecutedStep:
    """The step of a plan that flushes the pipeline after each update, with which the note compares."""
    schedule = "1f1b" if pipeline.update_every >= pipeline.stages else "gpipe"
    plan = replace(step.plan, pipeline=replace(pipeline, schedule=schedule), micro_batches=pipeline.update_every)
    return replace(step, plan=plan)
