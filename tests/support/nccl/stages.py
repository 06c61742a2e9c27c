"""Plays the sends and receives of a pipeline's schedule, as the executor of stages runs them, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.ir.pipeline import Pipeline
from autopar.ops.collectives import group_name
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.runtime.pipeline import stage_actions
from autopar.runtime.ranks.world import Pipe
from tests.support.nccl.recording import Played
from tests.support.nccl.traces import Compute, Event, Traces

FORWARD_SECONDS, BACKWARD_SECONDS, HALF_SECONDS = 1.0, 2.0, 1.0
_DEVICE = torch.device("cpu")


def played(pipeline: Pipeline, micro_batches: int, *, trains: bool = True) -> Traces:
    """The traces of all ranks of a pipeline in one step, with their first meeting."""
    world = Played(pipeline.ranks)
    lists = actions(pipeline, micro_batches)
    for rank in range(pipeline.ranks):
        with world.rank(rank) as recorder:
            mesh = init_device_mesh("cpu", (pipeline.ranks,), mesh_dim_names=("pp",))
            pipe = Pipe(rank, mesh, group_name(mesh.get_group()))
            stage_actions.greet(pipeline, pipe, _DEVICE)
            stages = {i: _Stage(recorder.trace, i, pipeline.stages) for i in pipeline.stages_of(rank)}
            run = stage_actions.StageActions(stages, pipeline, pipe, _DEVICE, trains=trains)
            with _timed_backwards(recorder.trace):
                run.run(lists[rank], exchanges=waits_for_sends(pipeline.schedule))
    return world.traces


@dataclass
class _Stage:
    """A stage that computes nothing, and records how long it would."""

    trace: list[Event]
    number: int
    stages: int

    def received(self, micro_batch: int) -> Sequence[Tensor]:
        return [_example()] if self.number else []

    def sent(self, micro_batch: int) -> Sequence[Tensor]:
        return [_example()] if self.number < self.stages - 1 else []

    @property
    def first_half(self) -> Any:
        return _halves(self.trace, HALF_SECONDS, HALF_SECONDS)

    def forward(self, micro_batch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        self.trace.append(Compute(FORWARD_SECONDS))
        return [torch.zeros(1)]

    def begin_backward(self, micro_batch: int, *, last: bool) -> None: ...

    def end_backward(self, micro_batch: int) -> None: ...

    def update(self, micro_batch: int) -> None: ...


def _example() -> Tensor:
    return torch.empty(1, device="meta", requires_grad=True)


def _timed_backwards(trace: list[Event]) -> Any:
    """Context in which a whole backward is recorded, and computes nothing."""
    return mock.patch.object(stage_actions, "WholeBackward", _halves(trace, BACKWARD_SECONDS, 0.0))


def _halves(trace: list[Event], first_seconds: float, second_seconds: float) -> type:
    """A class whose construction stands for a backward or its first half; `run_weights` is the second half."""

    class Halves:
        def __init__(self, roots: Any, gradients: Any, received: Sequence[Tensor]) -> None:
            trace.append(Compute(first_seconds))
            self.input_gradients = [torch.zeros(1) for _ in received]

        def run_weights(self) -> None:
            trace.append(Compute(second_seconds))

    return Halves
