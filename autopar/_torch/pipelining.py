"""torch.distributed.pipelining: the actions of a schedule, and a stage of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _StandInStage:
    """A stand-in for a pipeline stage, which records in `log` every action that a schedule asks for.

    Its sends and receives are empty lists, so that no process group is needed.
    """

    submod = None

    def __init__(self, index: int, count: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.log: list[tuple[str, int, int]] = []

    def _note(self, kind: str, micro_batch: int, there_is: bool = True) -> list[dist.P2POp]:
        if there_is:
            self.log.append((kind, self.stage_index, micro_batch))
        return []

    def get_fwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("RECV_F", micro_batch, not self.is_first)

    def get_fwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("SEND_F", micro_batch, not self.is_last)

    def get_bwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("RECV_B", micro_batch, not self.is_last)

    def get_bwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        return self._note("SEND_B", micro_batch, not self.is_first)

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self._note("F", micro_batch)

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self._note("B", micro_batch)

    def perform_reduce_grad(self, _: int) -> None:
        pass


def pipeline_actions(
    schedule: type[Any], stages_of: Sequence[Sequence[int]], micro_batches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The actions of every rank under a schedule class of torch.distributed.pipelining, in order.

    Schedules of one stage a rank are a loop, which is run on stand-ins: the order that
    `Schedule1F1B` tells of itself (`pipeline_order`) numbers the last rank's micro-batches from 1.
    The others run the list that they made at birth, sends and receives included; an overlapped
    forward and backward are run one after the other, and so they are here.

    Args:
        schedule: the class.
        stages_of: the stages of every rank.
        micro_batches: number of micro-batches; the class raises ValueError for a number that it does not support.

    Returns:
        (kind, stage, micro-batch) for every action of every rank, without those for FSDP.
    """
    stages = _stand_ins(stages_of)
    if not runs_one_stage(schedule):
        lists = schedule(stages[0], micro_batches).pipeline_order_with_comms
        return tuple(_flat_actions(lists[rank]) for rank in range(len(stages)))
    # One object runs the stages of all ranks: at birth it makes a list for every rank.
    built = schedule(stages[0][0], micro_batches)
    built._stage_forward_initialized = True  # or it would look for neighbours to receive from
    return tuple(_looped_actions(built, stage) for (stage,) in stages)


def pipeline_computations(
    schedule: type[Any], stages_of: Sequence[Sequence[int]], micro_batches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The forwards and backwards of `pipeline_actions`, in order, without sends and receives.

    A class with several stages a rank adds sends and receives to its list at birth, which takes most of the time, and
    keeps the order of computations. Here it adds none. Arguments and errors are those of `pipeline_actions`; the class
    takes several stages a rank.
    """
    bare = type(schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": _prepare_nothing})
    lists = bare(_stand_ins(stages_of)[0], micro_batches).pipeline_order
    return tuple(_flat_actions(filter(None, lists[rank])) for rank in range(len(stages_of)))


def _prepare_nothing(*_: object, **__: object) -> None:
    """Stands in for the method of a schedule class that adds sends and receives."""


def _stand_ins(stages_of: Sequence[Sequence[int]]) -> list[list[_StandInStage]]:
    """A stand-in for every stage of every rank."""
    ranks, count = len(stages_of), sum(map(len, stages_of))
    return [
        [_StandInStage(index, count, rank, ranks) for index in found]
        for rank, found in enumerate(stages_of)
    ]


def _looped_actions(built: Any, stage: _StandInStage) -> tuple[tuple[str, int, int], ...]:
    built._stage = stage
    built._step_microbatches()
    return tuple(stage.log)


def _flat_actions(actions: Iterable[Any]) -> tuple[tuple[str, int, int], ...]:
    parts = (part for each in actions for part in each.sub_actions or (each,))
    return tuple(
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.microbatch_index is not None
    )


def runs_one_stage(schedule: type) -> bool:
    """Whether a schedule class of torch.distributed.pipelining takes a single stage instead of a list of stages."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return issubclass(schedule, PipelineScheduleSingle)


def pipeline_stage(
    module: nn.Module,
    number: int,
    count: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    received: tuple[Tensor, ...],
    sent: tuple[Tensor, ...],
    split_backward: Callable[..., Any],
    before_backward: Callable[..., None],
    after_backward: Callable[[int], None],
) -> Any:
    """A `PipelineStage` that says when a micro-batch's gradients begin and end to accumulate.

    Args:
        module: module of the stage; it takes the received tensors and keyword arguments, and returns the tensors
            to send, or the loss.
        number: position of the stage.
        count: number of stages.
        received: examples of received tensors on the meta device, which need a gradient where one is sent back.
        sent: examples of sent tensors on the meta device, which need a gradient where one comes back.
        split_backward: function of results, their gradients and inputs; returns an object with `input_gradients` and
            `run_weights()`, the two halves of a backward.
        before_backward: called with a micro-batch's number and `last`, whether it is the step's last.
        after_backward: called with a micro-batch's number.
    """
    from autopar._torch.watched_stage import WatchedStage  # half a second

    made = WatchedStage(
        module, number, count, device, input_args=received, output_args=sent, group=group
    )
    made.before_backward, made.after_backward = before_backward, after_backward
    made.split_backward, made.halves = split_backward, {}
    made.received, made.sent = received, sent
    return made
