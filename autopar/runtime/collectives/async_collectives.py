"""Collectives of activations in two calls, one that starts and one that waits; see `autopar.passes.start_early`.

Both calls are nodes of autograd's graph, joined by a tensor without meaning. The backward of the second starts the
transposed collective on the gradient, and the backward of the first waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.ops.collectives import Collective
from autopar.runtime.collectives.hops import Hop
from autopar.runtime.collectives.transfer import Transfer, travel
from autopar.runtime.ranks.world import World


class StartCollective(nn.Module):
    """Starts a collective.

    Args:
        call: the collective, whose group is named by a mesh axis.
        world: the process groups.
    """

    def __init__(self, call: Collective, world: World) -> None:
        super().__init__()
        self._call, self._world = call.call(world.mesh), world

    def forward(self, x: Tensor) -> tuple[Tensor, StartedCollective]:
        """Starts it on a local tensor; returns the handle for `finish`."""
        message = StartedCollective(Hop.of(self._call, tuple(x.shape), self._world.mesh), self._world)
        return _StartCollective.apply(x, message), message


def finish(started: tuple[Tensor, StartedCollective]) -> Tensor:
    """Waits for the result of a collective that `StartCollective` has started."""
    found: Tensor = _FinishCollective.apply(*started)
    return found


class StartedCollective:
    """The collective of a tensor in flight, and later that of its gradient.

    Args:
        hop: the collective with its shapes.
        world: the process groups.
    """

    def __init__(self, hop: Hop, world: World) -> None:
        self.hop, self.world = hop, world
        self._there: Transfer | None = None
        self._back: Transfer | Tensor | None = None
        self._format = torch.bool

    def send(self, x: Tensor) -> None:
        """Starts the collective. Bool tensors are sent as uint8, because backends do not support bool."""
        self._format = x.dtype
        x = x.to(torch.uint8) if x.dtype is torch.bool else x
        self._there = _transfer(x, self.hop, self.world)

    def arrive(self) -> Tensor:
        """Waits for its result."""
        assert self._there is not None, "a message arrives once"
        (x,), self._there = self._there.wait(), None
        return x.to(self._format)

    def send_back(self, gradient: Tensor) -> None:
        """Starts the transposed collective; for a differentiable gradient it waits immediately."""
        back = self.hop.transpose
        if torch.is_grad_enabled():
            self._back = travel(gradient, (back,), self.world)
        else:
            self._back = _transfer(gradient, back, self.world)

    def arrive_back(self) -> Tensor:
        """Waits for the gradient."""
        back, self._back = self._back, None
        assert back is not None, "backward of a finish runs before that of its start"
        return back.wait()[0] if isinstance(back, Transfer) else back


def _transfer(x: Tensor, hop: Hop, world: World) -> Transfer:
    # An all-reduce is done in place, and autograd may give the tensor to others.
    return Transfer([(hop,)], [x.clone() if hop.name == "all_reduce" else x], world)


class _StartCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, message: StartedCollective) -> Tensor:
        ctx.message = message
        message.send(x.detach())
        return x.new_empty(())

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.message.arrive_back(), None


class _FinishCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, message: StartedCollective) -> Tensor:
        ctx.message = message
        return message.arrive()

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.message.send_back(gradient)
        return gradient.new_zeros(()), None
