"""A stage of torch.distributed.pipelining that says when gradients accumulate, and frees what it received.

PipelineStage makes a buffer for every tensor that any micro-batch will receive, and keeps all of them. Here a
buffer lives from its receive to the end of its micro-batch's backward.

Importing this module takes half a second, so that only `pipeline_stage` does, at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class WatchedStage(PipelineStage):
    """The stage that `autopar._torch.pipeline_stage` makes.

    Attributes:
        before_backward: called with a micro-batch's number and `last`, whether it is the step's last.
        after_backward: called with its number when a micro-batch's gradients are accumulated.
        split_backward: splits a backward into its two halves, see `pipeline_stage`.
        halves: number of a micro-batch -> the split backward whose second half is still to run.
        received: examples of received tensors on the meta device.
        sent: examples of sent tensors on the meta device.
    """

    before_backward: Callable[..., None]
    after_backward: Callable[[int], None]
    split_backward: Callable[..., Any]
    halves: dict[int, Any]
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # Before 2.13 torch would have buffers of integers need a gradient.
        trains, self.has_backward = self.has_backward, False
        try:
            result = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = trains
        for infos in self.args_recv_info.values():
            _free_buffers(infos)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _free_buffers(infos)
        return result

    # Before 2.13 torch sends a gradient back for every received tensor, has all of them need one, and lets neighbouring
    # stages of one rank greet each other, which Gloo refuses.

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        every = super()._get_init_p2p_neighbors_ops()
        return [op for op in every if op.group_peer != self.group_rank]

    def _create_grad_send_info(self, infos: tuple[Any, ...]) -> list[int | None]:
        found = zip(super()._create_grad_send_info(infos), self.received, strict=True)
        return [stage if example.requires_grad else None for stage, example in found]

    def get_fwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """The receive operations of a micro-batch's forward, with new buffers."""
        if not self.is_first:
            _make_buffers(self.args_recv_info[number], self.received, self.device)
            self._mark_leaves(number)
        return super().get_fwd_recv_ops(number)

    def get_bwd_recv_ops(self, number: int) -> list[dist.P2POp]:
        """The receive operations of a micro-batch's backward, with new buffers."""
        if not self.has_backward or self.is_last:
            return []
        infos = self.grad_recv_info[number]
        _make_buffers(infos, self.sent, self.device)
        pairs = zip(infos, self.sent, strict=True)
        return self._get_recv_ops(tuple(info for info, sent in pairs if sent.requires_grad))

    def set_local_fwd_input(self, results: Any, number: int) -> None:
        """Takes the results of the stage before from this rank itself."""
        given = (results,) if isinstance(results, Tensor) else results
        for info, x in zip(self.args_recv_info[number], given, strict=True):
            info.buffer = x.detach()
        self._mark_leaves(number)

    def get_local_bwd_output(self, number: int) -> Any:
        """The gradients for the stage before, where that is on this rank; none without a backward."""
        return super().get_local_bwd_output(number) if self.has_backward else ()

    def set_local_bwd_input(self, gradients: Sequence[Tensor | None], number: int) -> None:
        """Takes the gradients of the stage after from this rank itself."""
        if not self.has_backward:
            return
        for info, x in zip(self.grad_recv_info[number], gradients, strict=True):
            if x is not None:
                info.buffer = x

    def _mark_leaves(self, number: int) -> None:
        """Has the received activations need a gradient where one is sent back."""
        if self.has_backward and torch.is_grad_enabled():
            for info, example in zip(self.args_recv_info[number], self.received, strict=True):
                assert info.buffer is not None, "the stage is not the first"
                info.buffer.requires_grad_(example.requires_grad)

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the forward of a micro-batch; frees the received activations if no backward will follow."""
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
        """Runs the backward of a micro-batch, and frees the activations and gradients that it received.

        Args:
            number: number of the micro-batch.
            loss: loss of the micro-batch, on the last stage.
            full_backward: whether gradients of inputs and parameters are computed; if not, only those of inputs.
            last_backward: whether no other micro-batch of the step has its backward later.
        """
        if not self.has_backward:
            return
        arrived = () if self.is_first else self.args_recv_info[number]
        received = [info.buffer for info in arrived if info.buffer is not None]
        results, inputs = self.fwd_cache[number]
        if full_backward:
            self.before_backward(number, last=last_backward)
            super().backward_one_chunk(number, loss, full_backward, last_backward)
        else:
            del self.fwd_cache[number]
            self.bwd_cache[number] = self._input_gradients(number, results, inputs, loss)
        _free_graph((*results, loss))
        found = zip(self.bwd_cache[number], received, self.received, strict=False)
        self.bwd_cache[number] = tuple(_sendable(*each) for each in found)
        _free_buffers(self.args_recv_info[number])
        if not self.is_last:
            _free_buffers(self.grad_recv_info[number])
        if full_backward:
            self.after_backward(number)  # the graph is gone, and with it what it held of the leaves

    def backward_weight_one_chunk(self, number: int, last_backward: bool = False) -> None:
        """Runs the second half of a micro-batch's backward, which computes the gradients of parameters."""
        if not self.has_backward:
            return
        self.before_backward(number, last=last_backward)
        self.halves.pop(number).run_weights()
        self.after_backward(number)

    def _input_gradients(
        self, number: int, results: Sequence[Tensor], inputs: Sequence[Any], loss: Any
    ) -> tuple[Tensor | None, ...]:
        """Runs the first half of a micro-batch's backward, and stores the second half for later."""
        if self.is_last:
            half = self.split_backward((loss,), (None,), inputs)
        else:
            half = self.split_backward(results, self._retrieve_recv_grads(number), inputs)
        self.halves[number] = half
        return half.input_gradients[: len(self.args_recv_info[number])]


def _free_graph(results: Sequence[Any]) -> None:
    """Detaches results in place: torch keeps them, and with them the graph that they were made by."""
    for x in results:
        if isinstance(x, Tensor) and x.requires_grad:
            x.detach_()


def _sendable(gradient: Tensor | None, received: Tensor, example: Tensor) -> Tensor | None:
    """The gradient of a received tensor as a send takes it: contiguous, and before torch 2.13 never missing."""
    if gradient is not None:
        return gradient.contiguous()
    return torch.zeros_like(received) if example.requires_grad else None


def _free_buffers(infos: Sequence[Any]) -> None:
    """Drops the references to received tensors."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty(0, dtype=info.buffer.dtype, device=info.buffer.device)


def _make_buffers(infos: Sequence[Any], like: Sequence[Tensor], device: torch.device) -> None:
    """Allocates the buffers of the tensors to receive."""
    for info, example in zip(infos, like, strict=True):
        if info.buffer is not None:
            info.buffer = torch.empty(example.shape, dtype=example.dtype, device=device)
