"""The note of a plan whose schedule updates parameters without a flush: its effect on training, time and memory."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir import Pipeline
from autopar.ir.note import Note
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.weight_stashing import WeightVersions
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import counted, format_bytes, format_seconds


def with_delays(found: Planned, request: Request) -> Planned:
    """The plan with this note; unchanged if its schedule updates only at the end of a step."""
    pipeline = found.plan.pipeline
    if pipeline is None or not pipeline.update_every:
        return found
    step = ExecutedStep(found.graph, found.plan, request.hardware, request.training_state, request.software)
    return found.noted(Note(_sentence(step, pipeline), "versions"))


def _sentence(step: ExecutedStep, pipeline: Pipeline) -> str:
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
