"""torch.distributed.pipelining: the actions of a schedule, and a stage that frees what it received."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        micro_batches: how many; a number that the class refuses raises its ValueError.

    Returns:
        (kind, stage, micro-batch) for every action of every rank, without those for FSDP.
    """
    # Half a second to import, which only pipelines need.
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    ranks, count = len(stages_of), sum(map(len, stages_of))
    stages = [
        [_StandInStage(index, count, rank, ranks) for index in found]
        for rank, found in enumerate(stages_of)
    ]
    has_list = issubclass(schedule, PipelineScheduleMulti)  # of the class's own, not of its base
    if has_list:
        lists = schedule(stages[0], micro_batches).pipeline_order_with_comms
        return tuple(_flat_actions(lists[rank]) for rank in range(ranks))
    # One object runs the stages of all ranks: at birth it makes a list for every rank.
    built = schedule(stages[0][0], micro_batches)
    built._stage_forward_initialized = True  # or it would look for neighbours to receive from
    return tuple(_looped_actions(built, stage) for (stage,) in stages)


def _looped_actions(built: Any, stage: _StandInStage) -> tuple[tuple[str, int, int], ...]:
    built._stage = stage
    built._step_microbatches()
    return tuple(stage.log)


def _flat_actions(actions: Sequence[Any]) -> tuple[tuple[str, int, int], ...]:
    parts = (part for each in actions for part in each.sub_actions or (each,))
    return tuple(
        (part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.microbatch_index is not None
    )


def runs_one_stage(schedule: type) -> bool:
    """Whether a class of torch.distributed.pipelining takes one stage, and not a list of them."""
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
    after_backward: Callable[[], None],
) -> Any:
    """A `PipelineStage` that says when a micro-batch's gradients begin and end to accumulate.

    Args:
        module: called with what is received and keyword arguments; returns what is sent, or the loss.
        number, count: position of the stage, and number of stages.
        received, sent: examples on the meta device, which need a gradient where one comes back.
        split_backward: function of results, their gradients and inputs; returns an object with `input_gradients` and
            `run_weights()`, the two halves of a backward.
        before_backward: called with `last`, whether the micro-batch is the step's last.
    """
    made = _watched_stage()(
        module, number, count, device, input_args=received, output_args=sent, group=group
    )
    made.before_backward, made.after_backward = before_backward, after_backward
    made.split_backward, made.halves = split_backward, {}
    made.received, made.sent = received, sent
    return made


@functools.cache
def _watched_stage() -> type:
    from torch.distributed.pipelining import PipelineStage  # half a second

    class WatchedStage(PipelineStage):
        before_backward: Callable[..., None]
        after_backward: Callable[[], None]
        split_backward: Callable[..., Any]
        halves: dict[int, Any]
        received: tuple[Tensor, ...]
        sent: tuple[Tensor, ...]

        # PipelineStage makes a buffer for whatever any micro-batch will receive, and keeps all of them.
        # Here one lives from its receive to the end of its backward.

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._prepare_forward_infra(*args, **kwargs)
            for infos in self.args_recv_info.values():
                _free_buffers(infos)
            return result

        def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._prepare_backward_infra(*args, **kwargs)
            for infos in self.grad_recv_info.values():
                _free_buffers(infos)
            return result

        def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
            if not self.is_first:
                _make_buffers(self.args_recv_info[number], self.received, self.device)
            return super().get_fwd_recv_ops(number)

        def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
            if self.has_backward and not self.is_last:
                _make_buffers(self.grad_recv_info[number], self.sent, self.device)
            return super().get_bwd_recv_ops(number)

        def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            output = super().forward_one_chunk(number, *args, **kwargs)
            if not self.has_backward:
                _free_buffers(self.args_recv_info[number])
            return output

        def backward_one_chunk(
            self,
            number: int,
            loss: Any = None,
            full_backward: bool = True,
            last_backward: bool = False,
        ) -> None:
            if not self.has_backward:
                return
            arrived = () if self.is_first else self.args_recv_info[number]
            received = [info.buffer for info in arrived if info.buffer is not None]
            results, inputs = self.fwd_cache[number]
            if full_backward:
                self.before_backward(last=last_backward)
                super().backward_one_chunk(number, loss, full_backward, last_backward)
                self.after_backward()
            else:
                del self.fwd_cache[number]
                self.bwd_cache[number] = self.input_gradients(number, results, inputs, loss)
            for x in (*results, loss):  # torch keeps them, and they all that they were made of
                if isinstance(x, Tensor) and x.requires_grad:
                    x.detach_()
            # A send takes contiguous tensors, and before torch 2.13 a gradient of every input.
            pairs = zip(self.bwd_cache[number], received, strict=False)
            self.bwd_cache[number] = tuple(
                g.contiguous()
                if g is not None
                else torch.zeros_like(x)
                if x.requires_grad
                else None
                for g, x in pairs
            )
            _free_buffers(self.args_recv_info[number])
            if not self.is_last:
                _free_buffers(self.grad_recv_info[number])

        def input_gradients(
            self, number: int, results: Sequence[Tensor], inputs: Sequence[Any], loss: Any
        ) -> tuple[Tensor | None, ...]:
            if self.is_last:
                half = self.split_backward((loss,), (None,), inputs)
            else:
                half = self.split_backward(results, self._retrieve_recv_grads(number), inputs)
            self.halves[number] = half
            return half.input_gradients[: len(self.args_recv_info[number])]

        def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
            if not self.has_backward:
                return
            self.before_backward(last=last_backward)
            self.halves.pop(number).run_weights()
            self.after_backward()

    return WatchedStage


def _free_buffers(infos: Sequence[Any]) -> None:
    """Lets go of what was received."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty(0, dtype=info.buffer.dtype, device=info.buffer.device)


def _make_buffers(infos: Sequence[Any], like: Sequence[Tensor], device: torch.device) -> None:
    """Makes room for what is received."""
    for info, example in zip(infos, like, strict=True):
        if info.buffer is not None:
            info.buffer = torch.empty(example.shape, dtype=example.dtype, device=device)
