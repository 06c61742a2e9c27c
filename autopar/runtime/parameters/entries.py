"""Sums gradients over ranks inside the user's backward, for parameters that ranks hold whole.

[Note: a backward that does not wait] If all ranks hold a parameter whole, and use it for different parts of the work,
its gradient is the sum of their gradients. Autograd derives one collective per parameter, and waits for each. Here a
parameter passes two nodes of autograd's graph before its uses:

    parameter -> _Finish, one for all -> _Start, one for each group of parameters -> uses

In backward a group's `_Start` starts one collective for all gradients of the group, and `_Finish` waits for
those of all groups. Autograd runs later nodes first. A `_Start` is made right before the first use of its group, so it
runs as soon as its gradients are complete. `_Finish` is made before all other nodes, so it runs after the rest of the
backward. All readers of the gradient (`.grad`, hooks, `torch.autograd.grad`, other uses of the parameter) see the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.passes.group_gathers import Chain, find_entries, group_gathers
from autopar.runtime.collectives.hops import Route, signature, transposed
from autopar.runtime.collectives.transfer import Transfer, travel
from autopar.runtime.parameters.gather import route_of
from autopar.runtime.ranks.world import World


class Entries:
    """The parameters of one graph that need no gather: communication is needed for their gradients only."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._entering: list[int] = []
        self._backward: _Backward | None = None

    def install(self, module: fx.GraphModule, parameters: Sequence[Tensor], bucket_bytes: int) -> None:
        """Finds and groups them; the collectives of the graph still name mesh axes."""
        chains = find_entries(module, len(parameters))
        self._entering = sorted({chain.parameter for chain in chains})
        routes = {chain: route_of(chain, tuple(parameters[chain.parameter].shape), self.world.mesh) for chain in chains}

        def key(chain: Chain) -> object:
            parameter = parameters[chain.parameter]
            there, back = signature(routes[chain]), signature(transposed(routes[chain]))
            return there, back, parameter.dtype

        def size_bytes(chain: Chain) -> int:
            return torch.Size(routes[chain][-1].after).numel() * parameters[chain.parameter].element_size()

        def make(group: list[Chain]) -> nn.Module:
            places = [self._entering.index(chain.parameter) for chain in group]
            return _Entry(self, places, [routes[chain] for chain in group])

        group_gathers(
            module, chains, key=key, size_bytes=size_bytes, make=make, name="entry", bucket_bytes=bucket_bytes
        )

    def open(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The leaves in the form that the graph takes; called before each run of it."""
        entered = list(leaves)
        self._backward = None
        if self._entering and torch.is_grad_enabled():
            self._backward = _Backward()
            found = _Finish.apply(self._backward, *(leaves[i] for i in self._entering))
            for i, x in zip(self._entering, found, strict=True):
                entered[i] = x
        return entered

    def enter(self, entry: _Entry, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """A group at its first use."""
        if self._backward is None:
            return _kept_local(entry, leaves)
        return _Start.apply(self._backward, entry, *leaves)


class _Entry(nn.Module):
    """A group of parameters: their positions among all entries, and their routes."""

    def __init__(self, owner: Entries, places: list[int], routes: list[Route]) -> None:
        super().__init__()
        self._owner, self.places, self.routes = owner, places, routes

    @property
    def world(self) -> World:
        """The mesh that its gradients move on."""
        return self._owner.world

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self._owner.enter(self, leaves)


class _Backward:
    """The communication in flight in the backward of one run of the graph."""

    def __init__(self) -> None:
        self._under_way: list[tuple[list[int], Transfer]] = []

    def start(self, places: list[int], routes: list[Route], x: list[Tensor], world: World) -> None:
        """Starts the collective for the gradients at these positions."""
        # A transfer may write into what it is given, and autograd may give this to others, too.
        given = [x[0].clone()] if len(x) == 1 else x
        self._under_way.append((places, Transfer(routes, given, world)))

    def finish(self, totals: list[Tensor | None]) -> None:
        """Waits for the collectives, and adds the gradients."""
        arriving, self._under_way = self._under_way, []
        for places, transfer in arriving:
            for place, gradient in zip(places, transfer.wait(), strict=True):
                before = totals[place]
                totals[place] = gradient if before is None else before + gradient


def _kept_local(entry: _Entry, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The entry of a parameter, which needs no communication."""
    found = Transfer(entry.routes, leaves, entry.world).wait()
    return tuple(y.view_as(y) for y in found)


class _Finish(torch.autograd.Function):
    """Returns parameters unchanged; in backward it waits for the collectives of every `_Start`."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_of = backward
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in leaves)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        totals = list(grads)
        ctx.backward_of.finish(totals)
        return None, *totals


class _Start(torch.autograd.Function):
    """The entry of a group; in backward it starts one collective for all gradients of the group."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, entry: _Entry, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.backward_of, ctx.entry = backward, entry
        ctx.set_materialize_grads(False)
        return _kept_local(entry, leaves)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        entry: _Entry = ctx.entry
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        routes = [transposed(entry.routes[i]) for i in present]
        given = [gradient for gradient in grads if gradient is not None]
        result: list[Tensor | None] = [None] * len(grads)
        if torch.is_grad_enabled():  # of this backward a derivative will be taken
            for i, hops, gradient in zip(present, routes, given, strict=True):
                result[i] = travel(gradient, hops, entry.world)
        elif given:
            ctx.backward_of.start([entry.places[i] for i in present], routes, given, entry.world)
        return None, None, *result
