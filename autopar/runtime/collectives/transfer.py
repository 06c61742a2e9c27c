"""Transfers: several local tensors converted at once, one flat collective per hop.

`Transfer` runs tensors whose routes (`autopar.runtime.collectives.hops`) name the same ops and axes together: a
collective moves them in one buffer, and computation between its start and the wait overlaps with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.ir import Dims, Layout, Tier
from autopar.ir.call import FIT
from autopar.ir.tier import FROM_DEVICE, FROM_HOST, TO_DEVICE, TO_HOST
from autopar.ops.collectives import KERNELS, fitted, group_name, naming_failures, seen
from autopar.runtime.collectives.flat import STARTS, Started, group_of
from autopar.runtime.collectives.hops import Hop, Route, route, signature, transposed
from autopar.runtime.collectives.owners import OWNERS_STARTS
from autopar.runtime.ranks.tiers import Tiers
from autopar.runtime.ranks.world import World


def converted(x: Tensor, dims: Dims, source: Layout, target: Layout, world: World) -> Tensor:
    """A local tensor in another layout, differentiably."""
    return travel(x, route(dims, source, target, world.mesh, rank=world.rank), world)


def travel(x: Tensor, hops: Route, world: World) -> Tensor:
    """Converts one tensor along a route, differentiably: its gradient takes the transposed route."""
    travelled: Tensor = _Travel.apply(x, hops, world) if hops else x
    return travelled


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hops: Route, world: World) -> Tensor:
        ctx.hops, ctx.world = hops, world
        for hop in hops:
            x = seen(_run(hop, seen(x, hop.viewed), world), hop.after)
        return x.view_as(x)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return travel(grad, transposed(ctx.hops), ctx.world), None, None


class Transfer:
    """Tensors in flight; the first collective has started when the constructor returns.

    The transfer owns the tensors, and may write into them.
    """

    def __init__(self, routes: Sequence[Route], tensors: Sequence[Tensor], world: World) -> None:
        moving = [tuple(hop for hop in hops if hop.name != "vary") for hops in routes]
        assert len({signature(hops) for hops in moving}) <= 1, "routes must share one signature"
        self._world = world
        self._stages = [list(stage) for stage in zip(*moving, strict=True)]
        self._tensors = list(tensors)
        # The last hop of a route may be one that moves nothing, and has a shape all the same.
        self._shapes = [hops[-1].after if hops else x.shape for hops, x in zip(routes, tensors, strict=True)]
        self._started: Started | None = None
        self._advance()

    def wait(self) -> list[Tensor]:
        """Runs the remaining hops, and returns the tensors in their new layout."""
        while self._started is not None:
            started, self._started = self._started, None
            self._arrive(started.hops, started.wait())
            self._advance()
        return [seen(x, shape) for x, shape in zip(self._tensors, self._shapes, strict=True)]

    def _advance(self) -> None:
        """Runs local hops up to the next collective, and starts that."""
        while self._stages and self._started is None:
            hops = self._stages.pop(0)
            tensors = [seen(x, hop.viewed) for x, hop in zip(self._tensors, hops, strict=True)]
            self._tensors = []
            start = _STARTS.get(hops[0].name)
            if start is not None and hops[0].is_elsewhere:
                self._started = _pause(hops, tensors, self._world)
            elif start is not None:
                self._started = start(hops, tensors, self._world)
            else:
                self._arrive(hops, [_run(hop, x, self._world) for hop, x in zip(hops, tensors, strict=True)])

    def _arrive(self, hops: list[Hop], tensors: list[Tensor]) -> None:
        self._tensors = [seen(x, hop.after) for x, hop in zip(tensors, hops, strict=True)]


def _pause(hops: list[Hop], tensors: list[Tensor], world: World) -> Started:
    """Takes part in the order of collectives on a rank that has no element of the tensors that the others exchange.

    It waits where they do, so that all ranks start the collectives that follow in one order.
    """
    without = [_run(hop, x, world) for hop, x in zip(hops, tensors, strict=True)]
    return Started(hops, None, group_of(hops[0], world), lambda: without)


def _run(hop: Hop, x: Tensor, world: World) -> Tensor:
    """Runs one hop of a tensor that already has the hop's `viewed` shape."""
    if hop.is_elsewhere:
        return x.new_empty((0, *hop.result[1:]))
    if hop.name in OWNERS_STARTS:
        given = x.clone() if hop.name in ("reduce", "reduce_rows") else x  # done in place
        return OWNERS_STARTS[hop.name]([hop], [given], world).wait()[0]
    if hop.name == FIT:
        return fitted(x, hop.result)
    if hop.formats:
        result = x.to(hop.formats[1])
        is_far = hop.tier != "device" and result is not x
        return world.tiers.counted(result, hop.tier) if is_far else result
    if hop.name in _MOVES:
        return _MOVES[hop.name](world.tiers, x, hop.tier)
    return KERNELS[hop.name](x, list(hop.dims), hop.size, group_name(group_of(hop, world)))


def start_sum(
    x: Tensor, dims: list[int], size: int, group: str, backward: str
) -> tuple[Tensor, dist.Work, dist.ProcessGroup]:
    """Starts an all_reduce of a tensor without gradient, with the arguments of the graph's op."""
    found = _torch.resolve_group(group)
    total = x.clone(memory_format=torch.contiguous_format)
    with naming_failures("all_reduce", group_name(found)):
        return total, _torch.start_all_reduce(total, found), found


def finish_sum(started: tuple[Tensor, dist.Work, dist.ProcessGroup]) -> Tensor:
    """Waits for the sum that `start_sum` has started."""
    total, work, group = started
    with naming_failures("all_reduce", group_name(group)):
        work.wait()
    return total


_MOVES: dict[str, Callable[[Tiers, Tensor, Tier], Tensor]] = {
    TO_DEVICE: Tiers.to_device,
    FROM_DEVICE: Tiers.from_device,
    TO_HOST: Tiers.to_host,
    FROM_HOST: Tiers.from_host,
}
_STARTS = {**STARTS, **OWNERS_STARTS}
