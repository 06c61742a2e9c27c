"""Adds the meetings of replicas to the plan of one replica.

Replicas train separate copies of the model on their own rows, and exchange parameters every K steps: a meeting
(`autopar.ir.meeting`). All replicas run the same plan, which the search makes for the mesh of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost_model.items import TrainingState
from autopar.cost_model.step import Step
from autopar.ir import Graph, Meeting
from autopar.ir.note import Note
from autopar.pipeline.composed import composed, step_of
from autopar.search.given import Planned
from autopar.search.recipes import RecipeLike, format_recipe
from autopar.search.request import Request
from autopar.units import counted, format_bytes, format_seconds


def with_meeting(found: Planned, request: Request) -> Planned:
    """The plan of one replica with meetings added: when they are held, what they cost, and a note for the user.

    A request without replicas gives back the plan as it was found.
    """
    meeting = request.meeting
    if meeting is None:
        return found
    plan = replace(found.plan, meeting=meeting, recipe=_whole_recipe(meeting, request.recipe))
    state, software = request.training_state, request.software
    step = step_of(found.graph, plan, request.hardware, software=software, training_state=state)
    price = composed(found.graph, plan, request.hardware, software=software, training_state=state)
    note = Note(_sentence(found.graph, meeting, step), "replicas")
    return found._replace(plan=replace(plan, notes=(*plan.notes, note)), price=price)


def _whole_recipe(meeting: Meeting, inside: RecipeLike) -> str:
    """The recipe of all axes: that of the axis of the replicas, and the recipe of the axes inside a replica."""
    others = dict(inside) if isinstance(inside, Mapping) else {}
    return format_recipe({meeting.axis: f"{meeting.rule}:{meeting.steps}", **others})


def _sentence(graph: Graph, meeting: Meeting, step: Step) -> str:
    """Text of the note: why the result is not that of a single device, and how many bytes and seconds a step saves."""
    items = [i for i in step.items if i.phase == "meet" and i.resource == meeting.axis]
    scales = [meeting.steps * _gradient_scale(graph, i.of, step.run.training_state) for i in items]
    sizes = [float(i.count * i.traffic_bytes) for i in items]
    times = [float(i.count * i.seconds) for i in items]
    every_step = [
        sum(x * scale for x, scale in zip(each, scales, strict=True)) for each in (sizes, times)
    ]
    steps = meeting.steps
    older = f"up to {counted(steps - 1, 'step')} old" if steps > 1 else "never old"
    size_words = f"{format_bytes(sum(sizes))} a step in place of {format_bytes(every_step[0])}"
    seconds_words = f"{format_seconds(sum(times))} in place of {format_seconds(every_step[1])}"
    return (
        f"Not the result of a single device: {counted(meeting.replicas, 'replica')} along {meeting.axis} train on rows "
        f"of their own and meet {meeting}, so that what a replica knows of the others is {older}. Along "
        f"{meeting.axis} a rank sends {size_words} of data parallelism, in about {seconds_words}."
    )


def _gradient_scale(graph: Graph, name: str, state: TrainingState) -> float:
    """Bytes of a parameter's gradient, which data parallelism would send, for each byte of the stored parameter."""
    tensor = graph.tensors[graph.parameters[name]]
    own = state.gradient_bytes or tensor.gradient_scale * tensor.itemsize_bytes
    return own / tensor.at_rest.itemsize_bytes
