"""Transfers: several local tensors converted at once, one flat collective per hop.

A `Hop` is a `CollectiveCall` with the local shapes around it, a cast to another element type, or a move to
another tier; the hops from one layout to another are a route, and the transposed hops in reverse order take
the gradient back. `Transfer` runs tensors whose routes name the same ops and axes together: a collective moves
them in one buffer, and starts before it is waited for, so that what is computed meanwhile overlaps with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.ir import Dims, Layout, Mesh, Tier, calls, local_shape
from autopar.ir.tier import FROM_DEVICE, TO_DEVICE
from autopar.ops.collectives import KERNELS, group_name, naming_failures, result_shape
from autopar.runtime.tiers import Tiers
from autopar.runtime.world import World

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """One collective on a local tensor, a cast, or a move between the device and another tier.

    Attributes:
        name, backward: the op and its transpose; that of a cast is a cast back, and of a move a move back.
        dims: dims of the viewed tensor.
        axis: position of the mesh axis, which has at least two ranks; -1 of a cast or a move.
        size: ranks of the axis.
        before: shape of the local tensor.
        viewed: shape it is viewed in for the op.
        result: shape of the op's result.
        after: shape that is viewed in then.
        formats: the two element types of a cast, that of the gradient on its way back and that which the
            tensor takes. A cast to the type that the tensor already has changes only the gradient: that is
            how gradients are reduced in another type than tensors are gathered in.
        tier: the other memory of a move, or the memory that a cast is done in.
    """

    name: str
    backward: str
    dims: tuple[int, ...]
    axis: int
    size: int
    before: Shape
    viewed: Shape
    result: Shape
    after: Shape
    formats: tuple[torch.dtype, ...] = ()
    tier: Tier = "device"

    def transposed(self) -> Hop:
        """The hop that takes the gradient back."""
        return Hop(
            self.backward, self.name, self.dims[::-1], self.axis, self.size,
            self.after, self.result, self.viewed, self.before, self.formats[::-1], self.tier,
        )  # fmt: skip


Route = tuple[Hop, ...]


def route(dims: Dims, source: Layout, target: Layout, mesh: Mesh) -> Route:
    """The hops from one layout of a tensor to another; axes of one rank need none."""
    hops = []
    shape = local_shape(dims, source, mesh)
    for call in calls(dims, source, target, mesh):
        size = mesh.sizes[call.axis]
        viewed = call.before or shape
        result = tuple(result_shape(call.name, viewed, call.dims, size))
        after = call.after or result
        if size > 1:
            hops.append(
                Hop(
                    call.name,
                    call.backward,
                    call.dims,
                    call.axis,
                    size,
                    shape,
                    viewed,
                    result,
                    after,
                )
            )
        shape = after
    return tuple(hops)


def cast(shape: Shape, before: torch.dtype, after: torch.dtype, tier: Tier = "device") -> Hop:
    """The hop that casts a tensor of this shape to `after`, and its gradient to `before`."""
    return Hop("cast", "cast", (), -1, 1, shape, shape, shape, shape, (before, after), tier)


def arrival(shape: Shape, tier: Tier) -> Hop:
    """The hop that brings a tensor of this shape from a tier to the device, and its gradient back to the tier."""
    return Hop(TO_DEVICE, FROM_DEVICE, (), -1, 1, shape, shape, shape, shape, tier=tier)


def transposed(hops: Route) -> Route:
    """The route of the gradient."""
    return tuple(hop.transposed() for hop in reversed(hops))


def signature(hops: Route) -> tuple[tuple[str, int], ...]:
    """The properties that two routes must share to be run together; `vary` moves nothing and does not count."""
    return tuple((hop.name, hop.axis) for hop in hops if hop.name != "vary")


def travel(x: Tensor, hops: Route, world: World) -> Tensor:
    """Takes one tensor along a route, differentiably: its gradient takes the transposed route."""
    travelled: Tensor = _Travel.apply(x, hops, world) if hops else x
    return travelled


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hops: Route, world: World) -> Tensor:
        ctx.hops, ctx.world = hops, world
        for hop in hops:
            x = _run(hop, x.reshape(hop.viewed), world).reshape(hop.after)
        return x.view_as(x)

    @staticmethod
    @torch.compiler.disable  # [Note: backward inside forward]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return travel(grad, transposed(ctx.hops), ctx.world), None, None


class Transfer:
    """Tensors on their way; the first collective has started when the constructor returns.

    The tensors are given up: the transfer may write into them.
    """

    def __init__(self, routes: Sequence[Route], tensors: Sequence[Tensor], world: World) -> None:
        moving = [tuple(hop for hop in hops if hop.name != "vary") for hops in routes]
        assert len({signature(hops) for hops in moving}) <= 1, "routes must share one signature"
        self._world = world
        self._stages = [list(stage) for stage in zip(*moving, strict=True)]
        self._tensors = list(tensors)
        # The last hop of a route may be one that moves nothing, and has a shape all the same.
        self._shapes = [
            hops[-1].after if hops else x.shape for hops, x in zip(routes, tensors, strict=True)
        ]
        self._started: _Started | None = None
        self._advance()

    def wait(self) -> list[Tensor]:
        """Finishes the journey and returns the tensors in their new layout."""
        while self._started is not None:
            started, self._started = self._started, None
            self._arrive(started.hops, started.wait())
            self._advance()
        return [x.reshape(shape) for x, shape in zip(self._tensors, self._shapes, strict=True)]

    def _advance(self) -> None:
        """Runs local hops up to the next collective, and starts that."""
        while self._stages and self._started is None:
            hops = self._stages.pop(0)
            tensors = [x.reshape(hop.viewed) for x, hop in zip(self._tensors, hops, strict=True)]
            self._tensors = []
            start = _STARTS.get(hops[0].name)
            if start is not None:
                self._started = start(hops, tensors, self._world)
            else:
                self._arrive(hops, _run_locally(hops, tensors, self._world))

    def _arrive(self, hops: list[Hop], tensors: list[Tensor]) -> None:
        self._tensors = [x.reshape(hop.after) for x, hop in zip(tensors, hops, strict=True)]


def _run_locally(hops: list[Hop], tensors: list[Tensor], world: World) -> list[Tensor]:
    """Hops that are no flat collective, one by one."""
    return [_run(hop, x, world) for hop, x in zip(hops, tensors, strict=True)]


def _run(hop: Hop, x: Tensor, world: World) -> Tensor:
    """One hop of a tensor that is viewed in its shape already."""
    if hop.formats:
        result = x.to(hop.formats[1])
        is_far = hop.tier != "device" and result is not x
        return world.tiers.counted(result, hop.tier) if is_far else result
    if hop.name in _MOVES:
        return _MOVES[hop.name](world.tiers, x, hop.tier)
    return KERNELS[hop.name](x, list(hop.dims), hop.size, group_name(_group(hop, world)))


@dataclass
class _Started:
    """A collective under way and what to do with its result."""

    hops: list[Hop]
    work: Any
    group: dist.ProcessGroup
    unpack: Callable[[], list[Tensor]]

    def wait(self) -> list[Tensor]:
        with naming_failures(self.hops[0].name, group_name(self.group)):
            self.work.wait()
        return self.unpack()


def _group(hop: Hop, world: World) -> dist.ProcessGroup:
    group = world.groups[hop.axis]
    assert group is not None, hop
    return group


def _start_all_reduce(hops: list[Hop], tensors: list[Tensor], world: World) -> _Started:
    group = _group(hops[0], world)
    if len(tensors) == 1:
        flat = tensors[0].contiguous().view(-1)
    else:
        flat = torch.cat([x.reshape(-1) for x in tensors])
    shapes = [hop.result for hop in hops]

    def unpack() -> list[Tensor]:
        parts = flat.split([shape.numel() for shape in map(torch.Size, shapes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    with naming_failures("all_reduce", group_name(group)):
        work = _torch.start_all_reduce(flat, group)
    return _Started(hops, work, group, unpack)


def _start_all_gather(hops: list[Hop], tensors: list[Tensor], world: World) -> _Started:
    group, size = _group(hops[0], world), hops[0].size
    flat = (
        torch.cat([x.reshape(-1) for x in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
    )
    gathered = flat.new_empty(size, flat.numel())

    def unpack() -> list[Tensor]:
        parts = gathered.split([torch.Size(hop.viewed).numel() for hop in hops], dim=1)
        return [_join(part, hop) for part, hop in zip(parts, hops, strict=True)]

    with naming_failures("all_gather", group_name(group)):
        work = _torch.start_all_gather(gathered.view(-1), flat.contiguous(), group)
    return _Started(hops, work, group, unpack)


def _join(rows: Tensor, hop: Hop) -> Tensor:
    """One row per rank -> the shards concatenated along the hop's dim."""
    shards = rows.unflatten(1, hop.viewed) if hop.viewed else rows.view(hop.size)
    return shards.movedim(0, hop.dims[0]).reshape(hop.result).contiguous()


def _start_reduce_scatter(hops: list[Hop], tensors: list[Tensor], world: World) -> _Started:
    group = _group(hops[0], world)
    sizes = [torch.Size(hop.result).numel() for hop in hops]
    stacked = _stack(hops, tensors, sizes)
    tensors.clear()
    reduced = stacked.new_empty(sum(sizes))

    def unpack() -> list[Tensor]:
        parts = reduced.split(sizes)
        return [part.view(hop.result) for part, hop in zip(parts, hops, strict=True)]

    with naming_failures("reduce_scatter", group_name(group)):
        work = _torch.start_reduce_scatter(reduced, stacked.view(-1), group)
    return _Started(hops, work, group, unpack)


def _stack(hops: list[Hop], tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """The parts that go to rank i, of all tensors, as row i."""
    size = hops[0].size
    cut = [
        x.unflatten(h.dims[0], (size, -1)).movedim(h.dims[0], 0)
        for x, h in zip(tensors, hops, strict=True)
    ]
    if len(cut) == 1:
        return cut[0].contiguous().view(size, -1)
    stacked = tensors[0].new_empty(size, sum(sizes))
    for rows, part in zip(stacked.split(sizes, dim=1), cut, strict=True):
        rows.unflatten(1, part.shape[1:]).copy_(part)
    return stacked


def start_sum(
    x: Tensor, dims: list[int], size: int, group: str, backward: str
) -> tuple[Tensor, dist.Work, dist.ProcessGroup]:
    """Starts an all_reduce of a tensor without gradient, with the arguments of the graph's op."""
    found = _torch.resolve_group(group)
    total = x.clone(memory_format=torch.contiguous_format)
    with naming_failures("all_reduce", group_name(found)):
        return total, _torch.start_all_reduce(total, found), found


def finish_sum(started: tuple[Tensor, dist.Work, dist.ProcessGroup]) -> Tensor:
    """Waits for what `start_sum` began."""
    total, work, group = started
    with naming_failures("all_reduce", group_name(group)):
        work.wait()
    return total


_MOVES: dict[str, Callable[[Tiers, Tensor, Tier], Tensor]] = {
    TO_DEVICE: Tiers.to_device,
    FROM_DEVICE: Tiers.from_device,
}
_STARTS: dict[str, Callable[[list[Hop], list[Tensor], World], _Started]] = {
    "all_reduce": _start_all_reduce,
    "all_gather": _start_all_gather,
    "reduce_scatter": _start_reduce_scatter,
}
