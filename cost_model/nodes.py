"""Prices of single nodes of a graph: an op, a conversion, a parameter, each as items and holdings.

The functions here know no plan. `autopar.cost_model.pricer` calls them for the choices of one plan, and the search
for all choices, so that both use the same prices.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

from autopar.cost_model.arith import Quantity, smaller
from autopar.cost_model.collectives import own_collectives
from autopar.cost_model.compute import OpPrice, local_bytes
from autopar.cost_model.items import COMPUTE, MemoryItem, Phase, Region, WorkItem
from autopar.cost_model.memory import KeptSlice
from autopar.cost_model.node_items import numbers_out, places_of, words_of
from autopar.cost_model.owners import owned_share
from autopar.cost_model.parameter_items import ParameterItems
from autopar.cost_model.tier_moves import move_item, way_back
from autopar.cost_model.traffic import sends
from autopar.ir import Labels, Layout, Op, TieredLayout, has_owner
from autopar.ir.tier import moves


class NodePricer(ParameterItems):
    """Prices ops, conversions and parameters of a graph one by one; see `NodeItems` for its arguments."""

    def op(self, op: Op, labels: Labels) -> Iterator[WorkItem]:
        """Items of an op under its choices: forward, backward, and the collectives inside the op.

        Args:
            op: op of the graph.
            labels: label of the op's choice on every mesh axis.
        """
        region, count = self.place(op.name, op.module)
        pricing = OpPrice.of(op, labels, self.graph.tensors, self.sizes, self.hardware, self.inner)
        kernels = int(not self.inner.issuperset(op.results))
        phases: tuple[Phase, Phase] = ("forward", "backward")
        for phase, part in zip(phases, pricing, strict=True):
            if part.passes and (kernels or not op.is_view):
                yield WorkItem(
                    words_of(op),
                    op.kind,
                    COMPUTE,
                    phase,
                    region,
                    count * part.passes,
                    part.seconds,
                    part.traffic_bytes,
                    part.flops,
                    kernels,
                    of=op.name,
                    recomputed=self._recomputed(op.name, phase),
                    places=places_of(labels),
                )
        yield from self._own_collectives(op, labels, region, count)

    def _own_collectives(self, op: Op, labels: Labels, region: Region, count: Quantity) -> Iterator[WorkItem]:
        title = f"inside {words_of(op)}"
        for axis, forward, backward, before, after in own_collectives(op, labels, self.sizes):
            if forward:
                yield self._item(
                    title,
                    forward,
                    axis,
                    "forward",
                    region,
                    count,
                    before,
                    after,
                    "activation",
                    of=op.name,
                    places=places_of(labels),
                )
            if backward:
                yield self._item(
                    title,
                    backward,
                    axis,
                    "backward",
                    region,
                    count,
                    after,
                    before,
                    "activation",
                    of=op.name,
                    places=places_of(labels),
                )

    def working(self, op: Op, labels: Labels, block: Hashable) -> Iterator[MemoryItem]:
        """Memory that exists only while an op runs: the operands of a loss."""
        if op.transient:
            region, count = self.place(op.name, op.module)
            moved = local_bytes(op, labels, self.graph.tensors, self.sizes, self.inner)
            if all(self.position[axis] in owners for axis, owners in places_of(labels)):
                yield MemoryItem(words_of(op), "working", region, count * moved, op.name, block)

    def conversion(
        self, name: str, source: TieredLayout, target: Layout, user: str, *, again: bool
    ) -> Iterator[WorkItem]:
        """A conversion inside the graph, to a layout on the device.

        Args:
            name: name of the tensor.
            source: layout and tier of the tensor; only a parameter can be outside the device.
            target: layout that is needed.
            user: name of the first op that needs the result; "" for the end of the graph.
            again: whether backward repeats the gathers and the moves to the device.
        """
        tensor = self.graph.tensors[name]
        carries = "parameter" if name in self._parameters else "activation"
        region, count = self.place(name, self.modules.get(name, ""))
        title = self._title(name)
        yield from self._brought(name, source, user, again)
        for axis, forward, backward, before, after, places in self._steps(tensor, source.layout, target):
            yield self._item(
                title,
                forward,
                axis,
                "forward",
                region,
                count,
                before,
                after,
                carries,
                of=user,
                moves=name,
                places=places,
            )
            if tensor.needs_grad:
                back = "gradient" if carries == "parameter" else carries
                scale = self._gradient_scale(tensor) if carries == "parameter" else 1
                yield self._item(
                    title,
                    backward,
                    axis,
                    "backward",
                    region,
                    count,
                    after * scale,
                    before * scale,
                    back,
                    of=user,
                    moves=name,
                    places=places,
                )
            if again and tensor.needs_grad and forward == "all_gather":
                spared = carries == "parameter" and user in self.recomputed
                yield self._item(
                    title,
                    forward,
                    axis,
                    "backward",
                    region,
                    count,
                    before,
                    after,
                    carries,
                    of=user,
                    moves=name,
                    recomputed=-int(spared),
                    places=places,
                )

    def restored(self, kept: KeptSlice) -> Iterator[WorkItem]:
        """The gathers in backward of a tensor that is saved in slices, and its moves to the host and back."""
        op, tensor = self.graph.by_name[kept.user], self.graph.tensors[kept.tensor]
        region, count = self.place(op.name, op.module)
        title = f"of saved {numbers_out(kept.name)}"
        size, there = self.sizes.bytes(tensor, kept.slice_layout), moves("device", kept.tier)
        item = partial(
            move_item,
            title,
            size_bytes=size,
            hardware=self.hardware,
            region=region,
            count=count,
            of=op.name,
            carries="activation",
            every_micro_batch=True,
        )
        for move in there:
            yield item(move, phase="forward")
        for move in way_back(there):
            yield item(move, phase="backward")
        for axis, name, _, before, after, _ in self._steps(tensor, kept.slice_layout, kept.layout):
            yield self._item(
                title, name, axis, "backward", region, count, before, after, "activation", of=op.name, recomputed=0
            )

    def _brought(self, name: str, source: TieredLayout, user: str, again: bool) -> Iterator[WorkItem]:
        """The moves of a parameter to the device for a use, and those of its gradient back."""
        tensor, title = self.graph.tensors[name], self._title(name)
        region, count = self.place(name, self.modules.get(name, ""))
        size, way = self.sizes.bytes(tensor, source.layout), moves(source.tier, "device")
        item = partial(
            move_item,
            title,
            hardware=self.hardware,
            region=region,
            count=count,
            of=user,
            every_micro_batch=True,
            moves=name,
        )
        spared = self._recomputed(user, "forward")
        for move in way:
            yield item(move, size, phase="forward", carries="parameter", recomputed=spared)
            if again:
                yield item(move, size, phase="backward", carries="parameter", recomputed=-spared)
        for move in way_back(way) if tensor.needs_grad else ():
            back = self._gradient_scale(tensor) * size
            yield item(move, back, phase="backward", carries="gradient")

    def gathered(
        self, name: str, source: TieredLayout, target: Layout, user: str, block: Hashable
    ) -> Iterator[MemoryItem]:
        """Memory of the copies of a parameter that a block gathers, or moves to the device, for its use."""
        region, _ = self.place(name, self.modules[name])
        tensor = self.graph.tensors[name]
        if source.tier != "device":
            brought = self.sizes.bytes(tensor, source.layout)
            yield MemoryItem("gathered", "gathered", region, brought, user, block)
        share = owned_share(target, self.position, self.sizes) if has_owner(target) else 1
        for axis, forward, _, _, after, _ in self._steps(tensor, source.layout, target):
            if sends(forward) and share:
                held = after * smaller(1, self.sizes.axis(axis) - 1)
                yield MemoryItem("gathered", "gathered", region, held, user, block)
