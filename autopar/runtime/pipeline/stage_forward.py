"""A forward through pipeline stages, one after the other, whose backward goes through them the other way.

[Note: a chain of tokens] Autograd's graph of a rank has only what the rank has run. So that one backward of a loss,
which every rank calls, runs the stages of all ranks in order, whatever the loss uses, each rank has a scalar, the
token, that everything it sends and receives depends on:

    parameters and inputs -> token -> received from stage n-1 -> token -> sent to stage n+1 -> token -> the results

Backward follows it from the results: a rank waits for the gradients of what it sent, runs its stage, and sends the
gradients of what it received. The chain begins at the trained parameters and at the inputs that require a gradient, so
that `torch.autograd.grad` of any of them runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.errors import StepError
from autopar.ops.collectives import naming_failures
from autopar.program.program import Wire
from autopar.runtime.ranks.world import Pipe, World


@dataclass(frozen=True)
class Boundary:
    """Where one stage ends and the next begins, on two ranks.

    Attributes:
        wires: tensors that go from one stage to the next.
        peer: position along the pipeline of the rank on the other side.
        world: this rank's world.
        naming: function that makes a context in which an error of communication is named.
    """

    wires: Sequence[Wire]
    peer: int
    world: World
    naming: Callable[[], AbstractContextManager[None]]

    @property
    def pipe(self) -> Pipe:
        assert self.world.pipe is not None, "there are stages"
        return self.world.pipe

    def send(self, x: Tensor) -> None:
        dist.send(x.contiguous(), self.pipe.peer(self.peer), group=self.pipe.group)

    def receive(self, wire: Wire) -> Tensor:
        shape = wire.shape_on(self.world.rank, self.world.mesh)
        return self._received(torch.empty(shape, dtype=wire.dtype, device=self.world.device))

    def _received(self, x: Tensor) -> Tensor:
        dist.recv(x, self.pipe.peer(self.peer), group=self.pipe.group)
        return x

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient comes back over this boundary."""
        return any(wire.needs_grad for wire in self.wires)

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Sends which wires have a gradient, and these gradients."""
        if self.has_gradients:
            present = torch.tensor([g is not None for g in gradients], dtype=torch.uint8)
            self.send(present.to(self.world.device))
        for gradient in gradients:
            if gradient is not None:
                self.send(gradient)

    def receive_gradients(self) -> Iterator[Tensor | None]:
        """The gradient of each wire; None where there is none."""
        if not self.has_gradients:
            yield from (None for _ in self.wires)
            return
        size, device = len(self.wires), self.world.device
        present = self._received(torch.empty(size, dtype=torch.uint8, device=device)).tolist()
        for wire, has_one in zip(self.wires, present, strict=True):
            yield self.receive(wire) if has_one else None


def first_token(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """The token that a rank's chain begins with, see [Note: a chain of tokens]."""
    if not torch.is_grad_enabled():
        return torch.zeros((), device=device)
    token: Tensor = _Begin.apply(device, *parameters)
    return token


def entered(token: Tensor, inputs: Sequence[Tensor], pipe: Pipe) -> tuple[Tensor, list[Tensor]]:
    """Inputs whose gradients are summed over the stages; the token after that, so that all ranks sum together."""
    trained = [i for i, x in enumerate(inputs) if x.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return token, list(inputs)
    token, *entering = _Enter.apply(pipe, token, *(inputs[i] for i in trained))
    found = dict(zip(trained, entering, strict=True))
    return token, [found.get(i, x) for i, x in enumerate(inputs)]


def sent(boundary: Boundary, token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Sends a stage's results to the next stage; returns the token after that."""
    result: Tensor = _Send.apply(boundary, token, *tensors)
    return result


def received(boundary: Boundary, token: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Receives from the stage before; returns the token after that and the tensors."""
    token, *tensors = _Receive.apply(boundary, token)
    return token, tensors


def delivered_from(last: int, token: Tensor, x: Tensor, pipe: Pipe) -> Tensor:
    """Sends a result from one rank to all ranks of the pipeline.

    Args:
        last: position of the rank that has it.
        token: last token of this rank.
        x: the result, or a tensor of its shape to receive it in.
        pipe: this rank's place.
    """
    result: Tensor = _Deliver.apply(last, pipe, token, x)
    return result


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, device: torch.device, *parameters: Tensor) -> Tensor:
        ctx.elsewhere = [x.detach() if _torch.is_elsewhere(x) else None for x in parameters]
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.elsewhere  # as gradients, which have no values


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pipe: Pipe, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pipe = pipe
        return torch.zeros_like(token), *(x.view_as(x) for x in inputs)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        totals = [x.clone(memory_format=torch.contiguous_format) for x in gradients]
        for total in totals:
            with naming_failures("all_reduce", ctx.pipe.group_name):
                dist.all_reduce(total, group=ctx.pipe.group)
        return None, torch.zeros_like(token), *totals


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.boundary = boundary
        for x in tensors:
            boundary.send(x)
        return torch.zeros_like(token)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        with ctx.boundary.naming():
            return None, torch.zeros_like(token), *ctx.boundary.receive_gradients()


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, token: Tensor) -> tuple[Tensor, ...]:
        ctx.boundary, ctx.token = boundary, torch.zeros_like(token)
        ctx.set_materialize_grads(False)
        tensors = [boundary.receive(wire) for wire in boundary.wires]
        pairs = zip(tensors, boundary.wires, strict=True)
        ctx.mark_non_differentiable(*(x for x, wire in pairs if not wire.needs_grad))
        return torch.zeros_like(token), *tensors

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        with ctx.boundary.naming():
            ctx.boundary.send_gradients(gradients)
        return None, ctx.token


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last: int, pipe: Pipe, token: Tensor, x: Tensor) -> Tensor:
        ctx.has_made_it, ctx.token = pipe.rank == last, torch.zeros_like(token)
        own = x.contiguous()
        dist.broadcast(own, src=pipe.peer(last), group=pipe.group)
        if not (x.is_floating_point() or x.is_complex()):
            ctx.mark_non_differentiable(own)
        return own.view_as(own) if own is x else own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.token, gradient if ctx.has_made_it else None


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise StepError(
            "A derivative of a gradient was asked for (create_graph=True), which pipeline stages do not support: plan "
            "without stages, as with autopar.compile(..., recipe='zero3')."
        )
