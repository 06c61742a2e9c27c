"""Prices of single nodes of a graph: an op, a conversion, a parameter, each as items and holdings.

The functions here know no plan. `autopar.cost_model.pricer` calls them for the choices of one plan, and the search
for all choices, so that both use the same prices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial

from autopar.cost_model.arith import Quantity, larger, smaller
from autopar.cost_model.collectives import BUCKET_BYTES, collective_seconds, own_collectives
from autopar.cost_model.compute import OpPrice, inner_tensors, local_bytes, memory_seconds
from autopar.cost_model.hardware import Hardware, Link
from autopar.cost_model.items import (
    COMPUTE,
    FULL,
    Holding,
    Item,
    Phase,
    Places,
    Region,
    TrainingState,
)
from autopar.cost_model.memory import KeptSlice
from autopar.cost_model.owners import Position, is_own_copy, owned_share
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import sends, traffic_bytes
from autopar.cost_model.ways import move_item, way_back, way_to_resident
from autopar.ir import (
    ANY,
    Graph,
    Labels,
    Layout,
    LayoutStep,
    Meeting,
    Op,
    ParameterPlan,
    State,
    Tensor,
    Tier,
    TieredLayout,
    has_owner,
    owner_of,
    steps,
)
from autopar.ir.meeting import SERVER
from autopar.ir.tier import moves

LOSS = "aten.cross_entropy_loss"  # autograd saves neither its operands nor their gradients, which are as large


class NodePricer:
    """Prices nodes of a graph one by one.

    Args:
        graph: the captured model.
        sizes: local sizes of tensors on a rank.
        hardware: figures or symbols of the machine.
        links: link of every mesh axis, figures or symbols.
        layers: path of a list of repeated layers -> its number of layers, where it differs from the graph's number.
        training_state: gradients and optimizer states that training keeps for each parameter.
        fused: whether chains of element-wise ops run as one kernel, as `torch.compile` makes them.
        bucket_bytes: bytes of a bucket: parameters and gradients share collectives of this size.
        recomputed: names of the ops that run again when their block is recomputed.
        position: mesh coordinates of the rank whose memory is priced; it matters for parameters that one rank owns, see
            `autopar.cost_model.owners`.
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
        position: Position | None = None,
    ) -> None:
        self.position = position or [0] * len(sizes.mesh.axes)
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
        """The region of an op or tensor, and the number of layers of the whole model for which it stands."""
        place = self.graph.stack_of(module)
        if place is None:
            return self._regions.get(name, "before"), 1
        stack, index = place
        stands_for = self.layers[stack.path] - stack.captured + 1 if index == stack.middle else 1
        return "layers", stands_for

    # --- ops

    def op(self, op: Op, labels: Labels) -> Iterator[Item]:
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
                yield Item(
                    words_of(op), op.kind, COMPUTE, phase, region, count * part.passes,
                    part.seconds, part.traffic_bytes, part.flops, kernels, of=op.name,
                    recomputed=self._recomputed(op.name, phase), places=places_of(labels),
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
            if forward:
                yield self._item(
                    title, forward, axis, "forward", region, count, before, after, "activation",
                    of=op.name, places=places_of(labels),
                )  # fmt: skip
            if backward:
                yield self._item(
                    title, backward, axis, "backward", region, count, after, before, "activation",
                    of=op.name, places=places_of(labels),
                )  # fmt: skip

    def working(self, op: Op, labels: Labels, block: Hashable) -> Iterator[Holding]:
        """Memory that exists only while an op runs: the operands of a loss."""
        if op.kind == LOSS:
            region, count = self.place(op.name, op.module)
            moved = local_bytes(op, labels, self.graph.tensors, self.sizes, self.inner)
            if all(self.position[axis] in owners for axis, owners in places_of(labels)):
                yield Holding(words_of(op), "working", region, count * moved, op.name, block)

    # --- conversions

    def conversion(
        self, name: str, source: TieredLayout, target: Layout, user: str, *, again: bool
    ) -> Iterator[Item]:
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
        for axis, forward, backward, before, after, places in self._steps(
            tensor, source.layout, target
        ):
            yield self._item(
                title, forward, axis, "forward", region, count, before, after, carries, of=user, moves=name,
                places=places,
            )  # fmt: skip
            if tensor.needs_grad:
                back = "gradient" if carries == "parameter" else carries
                scale = self._gradient_scale(tensor) if carries == "parameter" else 1
                yield self._item(
                    title, backward, axis, "backward", region, count, after * scale, before * scale,
                    back, of=user, moves=name, places=places,
                )  # fmt: skip
            if again and tensor.needs_grad and forward == "all_gather":
                spared = carries == "parameter" and user in self.recomputed
                yield self._item(
                    title, forward, axis, "backward", region, count, before, after, carries, of=user, moves=name,
                    recomputed=-int(spared), places=places,
                )  # fmt: skip

    def restored(self, kept: KeptSlice) -> Iterator[Item]:
        """The gathers in backward of a tensor that is saved in slices, and its moves to the host and back."""
        op, tensor = self.graph.by_name[kept.user], self.graph.tensors[kept.tensor]
        region, count = self.place(op.name, op.module)
        title = f"of saved {numbers_out(kept.name)}"
        size, there = self.sizes.bytes(tensor, kept.slice_layout), moves("device", kept.tier)
        item = partial(
            move_item, title, size_bytes=size, hardware=self.hardware, region=region, count=count, of=op.name,
            carries="activation", every_micro_batch=True,
        )  # fmt: skip
        for move in there:
            yield item(move, phase="forward")
        for move in way_back(there):
            yield item(move, phase="backward")
        for axis, name, _, before, after, _ in self._steps(tensor, kept.slice_layout, kept.layout):
            yield self._item(
                title, name, axis, "backward", region, count, before, after, "activation", of=op.name,
                recomputed=0,
            )  # fmt: skip

    def _brought(self, name: str, source: TieredLayout, user: str, again: bool) -> Iterator[Item]:
        """The moves of a parameter to the device for a use, and those of its gradient back."""
        tensor, title = self.graph.tensors[name], self._title(name)
        region, count = self.place(name, self.modules.get(name, ""))
        size, way = self.sizes.bytes(tensor, source.layout), moves(source.tier, "device")
        item = partial(
            move_item, title, hardware=self.hardware, region=region, count=count, of=user, every_micro_batch=True,
            moves=name,
        )  # fmt: skip
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
    ) -> Iterator[Holding]:
        """Memory of the copies of a parameter that a block gathers, or moves to the device, for its use."""
        region, _ = self.place(name, self.modules[name])
        tensor = self.graph.tensors[name]
        if source.tier != "device":
            brought = self.sizes.bytes(tensor, source.layout)
            yield Holding("gathered", "gathered", region, brought, user, block)
        share = owned_share(target, self.position, self.sizes) if has_owner(target) else 1
        for axis, forward, _, _, after, _ in self._steps(tensor, source.layout, target):
            if sends(forward) and share:
                held = after * smaller(1, self.sizes.axis(axis) - 1)
                yield Holding("gathered", "gathered", region, held, user, block)

    # --- parameters

    def between_steps(self, name: str, how: ParameterPlan) -> Iterator[Item]:
        """Items of a parameter between steps: from storage to resident layout, and its gradient back."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        title = numbers_out(name)
        if tensor.needs_grad:
            yield self._accumulation(name, tensor, how, region, count)
        if tensor.is_cast:
            yield self._cast(name, tensor, how, region, count)
        yield from self._moves(name, tensor, how, region, count)
        for axis, forward, backward, before, after, places in self._steps(
            tensor, how.storage, how.resident
        ):
            yield self._item(
                title, forward, axis, "gather", region, count, before, after, "parameter",
                of=name, every_micro_batch=False, places=places,
            )  # fmt: skip
            if tensor.needs_grad:
                scale = self._gradient_scale(tensor)
                yield self._item(
                    title, backward, axis, "reduce", region, count, after * scale, before * scale,
                    "gradient", of=name, every_micro_batch=how.reduce == "micro_batch", places=places,
                )  # fmt: skip

    def parameter(self, name: str, how: ParameterPlan) -> Iterator[Holding]:
        """Memory of a parameter, its gradient and its optimizer states."""
        if has_owner(how.storage):
            yield from self._owned(name, how)
            return
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        stored = count * self.sizes.bytes(tensor.at_rest, how.storage)
        resident = count * self.sizes.bytes(tensor, how.resident)
        title, tier, used = numbers_out(name), how.tier, how.resident_tier
        held = resident if _grows(how.storage, how.resident) else stored
        held = stored + resident if tensor.is_cast else held
        if tier == "device":
            yield Holding(title, "parameters", region, held, name)
        else:
            yield Holding(title, "parameters", region, stored, name, tier=tier)
            if used != tier or tensor.is_cast or self._converts(how):
                yield Holding(
                    title, "parameters", region, resident, name, tier=used, is_stored=False
                )
        if not tensor.needs_grad:
            return
        for at, size in self._gradient_bytes(tensor, how):
            yield Holding(
                title, "gradients", region, count * size, name, tier=at, is_stored=at == tier
            )
        state = self.training_state
        updated = state.optimizer_bytes(tensor.at_rest, how.storage, self.sizes, count)
        yield Holding(title, "optimizer", region, updated, name, tier=tier)
        if state.meeting_copies:
            kept = state.meeting_copies * stored
            yield Holding(
                f"{title}, kept for meetings", "optimizer", region, kept, name, is_stored=False
            )

    def meeting(
        self, name: str, how: ParameterPlan, meeting: Meeting, link: Link
    ) -> Iterator[Item]:
        """Items of one parameter in a meeting of replicas: the messages, and the update from what they bring.

        Replicas take their mean by an all-reduce, or exchange messages with an asynchronous server. The update makes
        and takes messages (`Meeting.moves`).
        """
        tensor = self.graph.tensors[self.graph.parameters[name]]
        if not tensor.needs_grad:
            return
        region, count = self.place(name, name)
        stored = self.sizes.bytes(tensor.at_rest, how.storage)
        count = count / meeting.steps
        kind = "serve" if meeting.rule == SERVER else "all_reduce"
        seconds = collective_seconds(
            kind, before_bytes=stored, after_bytes=stored, ranks=meeting.replicas,
            link=link, hardware=self.hardware, bucketed=True, bucket_bytes=self.bucket_bytes,
        )  # fmt: skip
        sent = traffic_bytes(kind, before_bytes=stored, after_bytes=stored, ranks=meeting.replicas)
        yield Item(
            f"{kind} {numbers_out(name)}", kind, meeting.axis, "meet", region, count, seconds,
            sent, kernels=0, carries="parameter", every_micro_batch=False, ranks=meeting.replicas, of=name,
        )  # fmt: skip
        moved = meeting.moves * stored
        yield Item(
            "parameters of a meeting", "update", COMPUTE, "meet", region, count,
            memory_seconds(moved, self.hardware), moved, every_micro_batch=False, of=name,
        )  # fmt: skip

    def _owned(self, name: str, how: ParameterPlan) -> Iterator[Holding]:
        """Memory of a parameter that one rank owns, on the rank that owns most; see `autopar.cost_model.owners`."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        for kind, size, is_stored in self._owned_bytes(tensor, how, count):
            if not (isinstance(size, int | float) and size == 0):
                yield Holding(numbers_out(name), kind, region, size, name, is_stored=is_stored)

    def _owned_bytes(
        self, tensor: Tensor, how: ParameterPlan, count: Quantity
    ) -> Iterator[tuple[str, Quantity, bool]]:
        """Yields kind of memory, its bytes for `count` parameters, and whether the optimizer reads or updates it."""
        share = count * owned_share(how.storage, self.position, self.sizes)
        stored = share * self.sizes.bytes(tensor.at_rest, how.storage)
        if has_owner(how.resident):  # the other ranks have neither a copy nor a gradient
            count = count * owned_share(how.resident, self.position, self.sizes)
        copied = count * self.sizes.bytes(tensor, how.resident)
        if is_own_copy(how.storage, how.resident) and not tensor.is_cast:
            copied = copied - stored
        yield "parameters", stored, True
        yield "parameters", copied, False
        if not tensor.needs_grad:
            return
        ((_, summed),) = self._gradient_bytes(tensor, how)
        if how.reduce == "micro_batch":
            yield "gradients", share * summed, True
        else:  # on the owner `.grad` takes the place of the sum
            arrived = smaller(stored, count * summed)
            yield "gradients", arrived, True
            yield "gradients", count * summed - arrived, False
        state = self.training_state
        yield (
            "optimizer",
            share * state.optimizer_bytes(tensor.at_rest, how.storage, self.sizes),
            True,
        )

    def _gradient_bytes(
        self, tensor: Tensor, how: ParameterPlan
    ) -> Iterator[tuple[Tier, Quantity]]:
        """Bytes of a parameter's gradient, by tier.

        First the gradient is the sum over micro-batches; then `.grad` replaces it. `.grad` lies in the tier of the
        storage and has the parameter's stored dtype. Where gradients are reduced after every micro-batch, they are
        summed in `.grad`. Where a use gathers the parameter, the reduced shard stays on the device, or in the resident
        tier, until backward ends.
        """
        state, per_step = self.training_state, how.reduce == "step"
        scale = self._gradient_scale(tensor) + state.fresh_gradient_bytes / tensor.itemsize_bytes
        summed = scale * self.sizes.bytes(tensor, how.resident if per_step else how.storage)
        own_bytes = tensor.gradient_scale * tensor.itemsize_bytes
        widens = state.gradient_bytes is None and own_bytes < tensor.at_rest.itemsize_bytes
        arrived = self.sizes.bytes(tensor.at_rest, how.storage)
        used = how.resident_tier
        if how.tier == "device" or (how.tier == used and per_step and not self._converts(how)):
            yield how.tier, larger(summed, arrived) if widens else summed
            return
        yield how.tier, arrived if widens else scale * self.sizes.bytes(tensor, how.storage)
        if per_step or used != "device" or any(state.kind == "S" for state in how.resident):
            yield used, summed

    def _gradient_scale(self, tensor: Tensor) -> float:
        """Bytes of a parameter's gradient for each byte of the parameter."""
        given = self.training_state.gradient_bytes
        return tensor.gradient_scale if given is None else given / tensor.itemsize_bytes

    def _cast(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Item:
        """The item of the cast of a stored shard to the dtype of its use, once per step."""
        moved = self.sizes.bytes(tensor.at_rest, how.storage)
        moved = moved + self.sizes.bytes(tensor, how.storage)
        return Item(
            "casting parameters", "cast", COMPUTE, "gather", region, count,
            moved / self.hardware.updates_per_second(how.tier), moved, every_micro_batch=False, of=name,
            places=places_in(how.storage),
        )  # fmt: skip

    def _moves(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Iterator[Item]:
        """Items of the moves of a stored shard to its resident tier, and of its gradient back."""
        item = partial(
            move_item, numbers_out(name), hardware=self.hardware, region=region, count=count, of=name,
        )  # fmt: skip
        sizes = {
            "stored": self.sizes.bytes(tensor.at_rest, how.storage),
            "cast": self.sizes.bytes(tensor, how.storage),
            "resident": self.sizes.bytes(tensor, how.resident),
        }
        often = how.reduce == "micro_batch"
        for move, form in way_to_resident(how, casts=tensor.is_cast, converts=self._converts(how)):
            size = sizes[form]
            yield item(move, size, phase="gather", carries="parameter", every_micro_batch=False)
            if tensor.needs_grad:
                is_wide = tensor.is_cast and form == "stored"
                (back,), scale = way_back([move]), 1 if is_wide else self._gradient_scale(tensor)
                yield item(
                    back, scale * size, phase="reduce", carries="gradient", every_micro_batch=often
                )

    def _converts(self, how: ParameterPlan) -> bool:
        """Whether a parameter's resident layout differs from its storage along an axis of several ranks.

        An axis whose size is a symbol or an array counts as an axis of several ranks.
        """
        sizes = (self.sizes.axis(axis) for axis in range(len(how.storage)))
        is_single = [isinstance(size, int) and size == 1 for size in sizes]
        states = zip(how.storage, how.resident, is_single, strict=True)
        return any(a != b and not single for a, b, single in states)

    def _accumulation(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Item:
        """The item that adds a micro-batch's gradient to the accumulated one: it reads both and writes the sum."""
        held = self.sizes.bytes(tensor, how.resident)
        moved = held * (1 + 2 * self._gradient_scale(tensor))
        seconds = memory_seconds(moved, self.hardware)
        if how.resident_tier != "device":
            seconds = moved / self.hardware.updates_per_second(how.resident_tier)
        return Item(
            "accumulating gradients", "accumulate", COMPUTE, "backward", region, count, seconds, moved, of=name,
            places=places_in(how.resident),
        )  # fmt: skip

    # --- collectives

    def _steps(
        self, tensor: Tensor, source: Layout, target: Layout
    ) -> Iterator[tuple[int, str, str, Quantity, Quantity, Places]]:
        """Yields axis, both collectives, bytes before and after, and the ranks that take part in each step."""
        layout = list(source)
        before = self.sizes.bytes(tensor, source)
        for step in steps(source, target):
            places = _places_of_step(layout, step)
            layout[step.axis] = step.target
            after = self.sizes.bytes(tensor, tuple(layout))
            forward, backward = step.transition.forward, step.transition.backward
            yield step.axis, forward, backward, before, after, places
            before = after

    def _item(
        self, title: str, name: str, axis: int, phase: Phase, region: Region, count: Quantity,
        before: Quantity, after: Quantity, carries: str, *, of: str, every_micro_batch: bool = True,
        recomputed: int | None = None,
        moves: str = "", places: Places = (),
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
            recomputed=self._recomputed(of, phase) if recomputed is None else recomputed, places=places,
        )  # fmt: skip

    def _title(self, name: str) -> str:
        """Words for a tensor in reports: the parameter's name, or the op that produces it."""
        if name in self.graph.producer:
            return f"of {words_of(self.graph.producer[name])}"
        return numbers_out(self.modules.get(name, name))


def places_of(labels: Labels) -> Places:
    """The ranks that run an op: for each axis with a label such as `@1`, the axis and the position of this rank."""
    owners = ((axis, owner_of(label)) for axis, label in enumerate(labels))
    return tuple((axis, (owner,)) for axis, owner in owners if owner is not None)


def places_in(layout: Sequence[State]) -> Places:
    """The ranks that have a tensor in this layout: for each axis with an owner, the axis and the owner's position."""
    owned = ((axis, s.owner) for axis, s in enumerate(layout) if s.kind == "O" and s.owner != ANY)
    return tuple((axis, (owner,)) for axis, owner in owned)


def _places_of_step(layout: Sequence[State], step: LayoutStep) -> Places:
    """The ranks that take part in a step of a conversion: along its own axis all, or both ends of a send."""
    found = tuple(place for place in places_in(layout) if place[0] != step.axis)
    if step.source.kind == step.target.kind == "O":
        found += ((step.axis, (step.source.owner, step.target.owner)),)
    return found


def _grows(storage: Layout, resident: Layout) -> bool:
    return any(a.kind == "S" and b.kind != "S" for a, b in zip(storage, resident, strict=True))


def regions_of(graph: Graph) -> dict[str, Region]:
    """Op, tensor or parameter name -> "before" or "after" the repeated layers; names inside them are meaningless."""
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
    """A path with `*` in place of the numbers of layers.

    >>> numbers_out("layers.3.mlp.up.weight")
    'layers.*.mlp.up.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def words_of(op: Op) -> str:
    """Words for an op in reports: `mlp linear`, or `sum` for an op outside every submodule."""
    return f"{_leaf(op.module)} {op.kind.removeprefix('aten.')}".strip()


def _leaf(module: str) -> str:
    """The last two names of a module's path without numbers, such as `mlp.up`."""
    names = [part for part in module.split(".") if not part.isdigit()]
    return ".".join(names[-2:])
