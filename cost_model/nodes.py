"""Prices of single nodes of a graph: an op, a conversion, a parameter, each as items and holdings.

Nothing here knows a plan. `autopar.cost_model.pricer` asks for the choices that a plan has made, and
the search asks for all of them, so that both speak of the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from autopar.cost_model.arith import Quantity, larger, smaller
from autopar.cost_model.collectives import BUCKET_BYTES, collective_seconds, own_collectives
from autopar.cost_model.compute import OpPrice, inner_tensors, local_bytes, memory_seconds
from autopar.cost_model.hardware import Hardware, Link
from autopar.cost_model.items import COMPUTE, FULL, Holding, Item, Phase, Region, TrainingState
from autopar.cost_model.memory import KeptSlice
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import sends, traffic_bytes
from autopar.ir import Graph, Labels, Layout, Op, ParameterPlan, Tensor, Tier, steps
from autopar.ir.tier import FROM_DEVICE, TO_DEVICE

LOSS = "aten.cross_entropy_loss"  # its operands have gradients as large, and nothing keeps either


class NodePricer:
    """Prices nodes of a graph one by one.

    Args:
        graph: the captured model.
        sizes: local sizes of tensors on a rank.
        hardware: figures or symbols of the machine.
        links: link of every mesh axis, figures or symbols.
        layers: number of layers of every stack, by path, where it differs from the graph's own.
        training_state: bytes that training keeps in addition to parameters.
        fused: whether chains of element-wise ops are one kernel, as a compiler makes them.
        bucket_bytes: size of the collectives that parameters and gradients share.
        recomputed: ops that the recomputation of their block executes, see `Item.recomputed`.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        sizes: Sizes,
        hardware: Hardware,
        links: Sequence[Link],
        layers: Mapping[str, Quantity] | None = None,
        training_state: TrainingState = FULL,
        fused: bool = False,
        bucket_bytes: float = BUCKET_BYTES,
        recomputed: Collection[str] = (),
    ) -> None:
        self.graph, self.sizes, self.bucket_bytes = graph, sizes, bucket_bytes
        self.hardware, self.links, self.training_state = hardware, tuple(links), training_state
        self.layers = {stack.path: stack.layers for stack in graph.stacks} | dict(layers or {})
        self.recomputed = frozenset(recomputed)
        self.inner = inner_tensors(graph) if fused else frozenset()
        self.modules = {name: op.module for op in graph.ops for name in op.results}
        self.modules |= {tensor: name for name, tensor in graph.parameters.items()}
        self._regions = regions_of(graph)
        self._parameters = frozenset(graph.parameters.values())

    def place(self, name: str, module: str) -> tuple[Region, Quantity]:
        """The region of an op or tensor, and how many of the whole model it stands for."""
        place = self.graph.stack_of(module)
        if place is None:
            return self._regions.get(name, "before"), 1
        stack, index = place
        stands_for = self.layers[stack.path] - stack.captured + 1 if index == stack.middle else 1
        return "layers", stands_for

    # --- ops

    def op(self, op: Op, labels: Labels) -> Iterator[Item]:
        """Forward and backward of an op, and the collectives that its parts run inside it."""
        region, count = self.place(op.name, op.module)
        pricing = OpPrice.of(op, labels, self.graph.tensors, self.sizes, self.hardware, self.inner)
        kernels = int(not self.inner.issuperset(op.results))
        phases: tuple[Phase, Phase] = ("forward", "backward")
        for phase, part in zip(phases, pricing, strict=True):
            if part.passes and (kernels or not op.is_view):
                yield Item(
                    words_of(op), op.kind, COMPUTE, phase, region, count * part.passes,
                    part.seconds, part.traffic_bytes, part.flops, kernels, of=op.name,
                    recomputed=self._recomputed(op.name, phase),
                )  # fmt: skip
        yield from self._own_collectives(op, labels, region, count)

    def _recomputed(self, op: str, phase: Phase) -> int:
        """See `Item.recomputed`."""
        return int(phase == "forward" and op in self.recomputed)

    def _own_collectives(
        self, op: Op, labels: Labels, region: Region, count: Quantity
    ) -> Iterator[Item]:
        title = f"inside {words_of(op)}"
        for axis, forward, backward, before, after in own_collectives(op, labels, self.sizes):
            yield self._item(
                title, forward, axis, "forward", region, count, before, after, "activation", of=op.name
            )  # fmt: skip
            if backward:
                yield self._item(
                    title, backward, axis, "backward", region, count, after, before, "activation",
                    of=op.name,
                )  # fmt: skip

    def working(self, op: Op, labels: Labels, block: Hashable) -> Iterator[Holding]:
        """Memory that an op needs while it runs, and that nothing keeps: the operands of a loss."""
        if op.kind == LOSS:
            region, count = self.place(op.name, op.module)
            moved = local_bytes(op, labels, self.graph.tensors, self.sizes, self.inner)
            yield Holding(words_of(op), "working", region, count * moved, op.name, block)

    # --- conversions

    def conversion(
        self, name: str, source: Layout, target: Layout, user: str, *, again: bool
    ) -> Iterator[Item]:
        """A conversion inside the graph.

        Args:
            user: the first op that needs the result, "" for the end of the graph.
            again: whether backward gathers once more what forward gathers.
        """
        tensor = self.graph.tensors[name]
        carries = "parameter" if name in self._parameters else "activation"
        region, count = self.place(name, self.modules.get(name, ""))
        title = self._title(name)
        for axis, forward, backward, before, after in self._steps(tensor, source, target):
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
            )
            if tensor.needs_grad:
                back = "gradient" if carries == "parameter" else carries
                scale = self._gradient_scale(tensor) if carries == "parameter" else 1
                yield self._item(
                    title, backward, axis, "backward", region, count, after * scale, before * scale,
                    back, of=user, moves=name,
                )  # fmt: skip
            if again and tensor.needs_grad and forward == "all_gather":
                spared = carries == "parameter" and user in self.recomputed
                yield self._item(
                    title, forward, axis, "backward", region, count, before, after, carries, of=user, moves=name,
                    recomputed=-int(spared),
                )  # fmt: skip

    def restored(self, kept: KeptSlice) -> Iterator[Item]:
        """The gathers that make a tensor whole for backward, of which a block has kept a slice."""
        op, tensor = self.graph.by_name[kept.user], self.graph.tensors[kept.tensor]
        region, count = self.place(op.name, op.module)
        title = f"of saved {numbers_out(kept.name)}"
        for axis, name, _, before, after in self._steps(tensor, kept.slice_layout, kept.layout):
            yield self._item(
                title, name, axis, "backward", region, count, before, after, "activation", of=op.name,
                recomputed=0,
            )  # fmt: skip

    def gathered(
        self, name: str, source: Layout, target: Layout, user: str, block: Hashable
    ) -> Iterator[Holding]:
        """Copies of a parameter that its use in a block gathers; nothing for an axis of one rank."""
        region, _ = self.place(name, self.modules[name])
        for axis, forward, _, _, after in self._steps(self.graph.tensors[name], source, target):
            if sends(forward):
                held = after * smaller(1, self.sizes.axis(axis) - 1)
                yield Holding("gathered", "gathered", region, held, user, block)

    # --- parameters

    def between_steps(self, name: str, how: ParameterPlan) -> Iterator[Item]:
        """A parameter's way from storage to its resident layout, and its gradient's way back."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        title = numbers_out(name)
        if tensor.needs_grad:
            yield self._accumulation(name, tensor, how.resident, region, count)
        if tensor.is_cast:
            yield self._cast(name, tensor, how, region, count)
        if how.tier != "device":
            yield from self._moves(name, tensor, how, region, count)
        for axis, forward, backward, before, after in self._steps(
            tensor, how.storage, how.resident
        ):
            yield self._item(
                title, forward, axis, "gather", region, count, before, after, "parameter",
                of=name, every_micro_batch=False,
            )  # fmt: skip
            if tensor.needs_grad:
                scale = self._gradient_scale(tensor)
                yield self._item(
                    title, backward, axis, "reduce", region, count, after * scale, before * scale,
                    "gradient", of=name, every_micro_batch=how.reduce == "micro_batch",
                )  # fmt: skip

    def parameter(self, name: str, how: ParameterPlan) -> Iterator[Holding]:
        """A parameter with its gradient and its optimizer states."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        stored = count * self.sizes.bytes(tensor.at_rest, how.storage)
        resident = count * self.sizes.bytes(tensor, how.resident)
        title, tier = numbers_out(name), how.tier
        held = resident if _grows(how.storage, how.resident) else stored
        held = stored + resident if tensor.is_cast else held
        if tier != "device":
            held = resident
            yield Holding(title, "parameters", region, stored, name, tier=tier)
        is_near = tier == "device"
        yield Holding(title, "parameters", region, held, name, is_stored=is_near)
        if not tensor.needs_grad:
            return
        for at, size in self._gradient_bytes(tensor, how):
            yield Holding(
                title, "gradients", region, count * size, name, tier=at, is_stored=at == tier
            )
        state = self.training_state
        updated = state.optimizer_bytes(tensor.at_rest, how.storage, self.sizes, count)
        yield Holding(title, "optimizer", region, updated, name, tier=tier)

    def _gradient_bytes(
        self, tensor: Tensor, how: ParameterPlan
    ) -> Iterator[tuple[Tier, Quantity]]:
        """Bytes of a gradient by tier: of the sum over micro-batches, and of `.grad`, which takes its place.

        `.grad` lies where the parameter is stored, and has its format. What every micro-batch reduces is added up in
        it; of a parameter whose uses gather it, the reduced shard stays on the device until backward ends.
        """
        state, per_step = self.training_state, how.reduce == "step"
        scale = self._gradient_scale(tensor) + state.fresh_gradient_bytes / tensor.itemsize_bytes
        summed = scale * self.sizes.bytes(tensor, how.resident if per_step else how.storage)
        own_bytes = tensor.gradient_scale * tensor.itemsize_bytes
        widens = state.gradient_bytes is None and own_bytes < tensor.at_rest.itemsize_bytes
        arrived = self.sizes.bytes(tensor.at_rest, how.storage)
        if how.tier == "device":
            yield "device", larger(summed, arrived) if widens else summed
            return
        yield how.tier, arrived if widens else scale * self.sizes.bytes(tensor, how.storage)
        if per_step or any(state.kind == "S" for state in how.resident):
            yield "device", summed

    def _gradient_scale(self, tensor: Tensor) -> float:
        """Bytes of a parameter's gradient for each byte of the parameter."""
        given = self.training_state.gradient_bytes
        return tensor.gradient_scale if given is None else given / tensor.itemsize_bytes

    def _cast(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Item:
        """Once a step the stored shard is read, and written in the format of its use."""
        moved = self.sizes.bytes(tensor.at_rest, how.storage)
        moved = moved + self.sizes.bytes(tensor, how.storage)
        return Item(
            "casting parameters", "cast", COMPUTE, "gather", region, count,
            moved / self.hardware.updates_per_second(how.tier), moved, every_micro_batch=False, of=name,
        )  # fmt: skip

    def _moves(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Iterator[Item]:
        """A stored shard's way to the device, and its gradient's way back, each in the format of its use."""
        host, moved = self.hardware.storing(how.tier), self.sizes.bytes(tensor, how.storage)
        sent: list[tuple[str, Phase, str, Quantity]] = [(TO_DEVICE, "gather", "parameter", moved)]
        if tensor.needs_grad:
            scale = self._gradient_scale(tensor)
            sent.append((FROM_DEVICE, "reduce", "gradient", scale * moved))
        for kind, phase, carries, size in sent:
            seconds = host.latency_seconds + size / host.bandwidth_bytes_per_second
            often = phase == "reduce" and how.reduce == "micro_batch"
            yield Item(
                f"{kind} {numbers_out(name)}", kind, how.tier, phase, region, count, seconds, size,
                carries=carries, every_micro_batch=often, of=name,
            )  # fmt: skip

    def _accumulation(
        self, name: str, tensor: Tensor, resident: Layout, region: Region, count: Quantity
    ) -> Item:
        """Adding a micro-batch's gradient to the sum: both are read, the sum is written."""
        held = self.sizes.bytes(tensor, resident)
        moved = held * (1 + 2 * self._gradient_scale(tensor))
        return Item(
            "accumulating gradients", "accumulate", COMPUTE, "backward", region, count,
            memory_seconds(moved, self.hardware), moved, of=name,
        )  # fmt: skip

    # --- collectives

    def _steps(
        self, tensor: Tensor, source: Layout, target: Layout
    ) -> Iterator[tuple[int, str, str, Quantity, Quantity]]:
        layout = list(source)
        before = self.sizes.bytes(tensor, source)
        for step in steps(source, target):
            layout[step.axis] = step.target
            after = self.sizes.bytes(tensor, tuple(layout))
            yield step.axis, step.transition.forward, step.transition.backward, before, after
            before = after

    def _item(
        self, title: str, name: str, axis: int, phase: Phase, region: Region, count: Quantity,
        before: Quantity, after: Quantity, carries: str, *, of: str, every_micro_batch: bool = True,
        recomputed: int | None = None,
        moves: str = "",
    ) -> Item:  # fmt: skip
        ranks = self.sizes.axis(axis)
        seconds = collective_seconds(
            name, before_bytes=before, after_bytes=after, ranks=ranks, link=self.links[axis],
            hardware=self.hardware, bucketed=carries != "activation",
            bucket_bytes=self.bucket_bytes,
        )  # fmt: skip
        sent = traffic_bytes(name, before_bytes=before, after_bytes=after, ranks=ranks)
        local = not sends(name)
        return Item(
            f"{name} {title}", name, COMPUTE if local else self.sizes.mesh.names[axis], phase, region,
            count, seconds, sent, kernels=int(carries == "activation"),
            carries="" if local else carries,
            every_micro_batch=every_micro_batch, ranks=1 if local else ranks, of=of, moves=moves,
            recomputed=self._recomputed(of, phase) if recomputed is None else recomputed,
        )  # fmt: skip

    def _title(self, name: str) -> str:
        """A tensor in a reader's words: the parameter's name, or the op that makes it."""
        if name in self.graph.producer:
            return f"of {words_of(self.graph.producer[name])}"
        return numbers_out(self.modules.get(name, name))


def _grows(storage: Layout, resident: Layout) -> bool:
    return any(a.kind == "S" and b.kind != "S" for a, b in zip(storage, resident, strict=True))


def regions_of(graph: Graph) -> dict[str, Region]:
    """For every op, tensor and parameter outside the layers whether it comes before or after them."""
    inside = [i for i, op in enumerate(graph.ops) if graph.stack_of(op.module)]
    first_after = inside[-1] + 1 if inside else 0
    regions: dict[str, Region] = {}
    for position, op in enumerate(graph.ops):
        region: Region = "before" if position < first_after else "after"
        for name in (op.name, *op.results):
            regions[name] = region
        for name in op.operands:
            regions.setdefault(name, region)
    for name, tensor in graph.parameters.items():
        regions[name] = regions.get(tensor, "before")
    return regions


def numbers_out(name: str) -> str:
    """A path with the numbers of layers starred: `layers.*.mlp.up.weight`."""
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def words_of(op: Op) -> str:
    """An op in a reader's words: `mlp linear`, or `sum` outside every module."""
    return f"{_leaf(op.module)} {op.kind.removeprefix('aten.')}".strip()


def _leaf(module: str) -> str:
    """The last two names of a module's path, numbers left out: `mlp.up`."""
    names = [part for part in module.split(".") if not part.isdigit()]
    return ".".join(names[-2:])
