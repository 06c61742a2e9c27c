"""Prices of parameters: what happens to them between steps, the memory that they hold, and meetings of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.cost_model.arith import Quantity, larger
from autopar.cost_model.collectives import collective_seconds
from autopar.cost_model.compute import memory_seconds
from autopar.cost_model.items import COMPUTE, MemoryItem, Region, WorkItem
from autopar.cost_model.machines.hardware import Link
from autopar.cost_model.node_items import NodeItems, numbers_out, places_in
from autopar.cost_model.owners import is_own_copy, owned_share
from autopar.cost_model.row_messages import message_bytes
from autopar.cost_model.tier_moves import move_item, way_back, way_to_resident
from autopar.cost_model.traffic import traffic_bytes
from autopar.ir import BY_ROWS, Layout, Meeting, ParameterPlan, Tensor, Tier, has_owner
from autopar.ir.meeting import SERVER


class ParameterItems(NodeItems):
    """Prices parameters of a graph one by one."""

    def between_steps(self, name: str, how: ParameterPlan) -> Iterator[WorkItem]:
        """Items of a parameter between steps: from storage to resident layout, and its gradient back."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        title = numbers_out(name)
        if tensor.needs_grad:
            yield self._accumulation(name, tensor, how, region, count)
            yield from self._update(name, how, region, count)
        if tensor.is_cast:
            yield self._cast(name, tensor, how, region, count)
        yield from self._moves(name, tensor, how, region, count)
        for axis, forward, backward, before, after, places in self._steps(tensor, how.storage, how.resident):
            yield self._item(
                title,
                forward,
                axis,
                "gather",
                region,
                count,
                before,
                after,
                "parameter",
                of=name,
                every_micro_batch=False,
                places=places,
            )
            if tensor.needs_grad:
                scale = self._gradient_scale(tensor)
                sent, kept = after * scale, before * scale
                if how.by_rows and backward in BY_ROWS:
                    backward, kept = BY_ROWS[backward], sent
                    sent = message_bytes(self, tensor, how, axis, sent)
                yield self._item(
                    title,
                    backward,
                    axis,
                    "reduce",
                    region,
                    count,
                    sent,
                    kept,
                    "gradient",
                    of=name,
                    every_micro_batch=how.reduce == "micro_batch",
                    places=places,
                )

    def messages_to_owner(self, name: str, how: ParameterPlan) -> Iterator[Quantity]:
        """Bytes of a gradient's message from one rank to the owner, for each axis along which it is sent."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        for axis, _, backward, _, after, _ in self._steps(tensor, how.storage, how.resident):
            if backward in BY_ROWS:
                whole = after * self._gradient_scale(tensor)
                yield message_bytes(self, tensor, how, axis, whole) if how.by_rows else whole

    def parameter(self, name: str, how: ParameterPlan) -> Iterator[MemoryItem]:
        """Memory of a parameter, its gradient and its optimizer states."""
        if has_owner(how.storage) or has_owner(how.resident):
            yield from self._owned(name, how)
            return
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        stored = count * self.sizes.bytes(tensor.at_rest, how.storage)
        resident = count * self.sizes.bytes(tensor, how.resident)
        title, tier = numbers_out(name), how.tier
        for at, size, is_stored in self._value_bytes(tensor, how, stored, resident):
            updates = is_stored and tensor.needs_grad  # a frozen parameter stays as it is
            yield MemoryItem(title, "parameters", region, size, name, tier=at, is_stored=updates)
        if not tensor.needs_grad:
            return
        for at, size in self._gradient_bytes(tensor, how):
            yield MemoryItem(title, "gradients", region, count * size, name, tier=at, is_stored=at == tier)
        state = self.training_state
        updated = state.optimizer_bytes(tensor.at_rest, how.storage, self.sizes, count)
        yield MemoryItem(title, "optimizer", region, updated, name, tier=tier)
        yield from self._kept_for_meetings(name, stored, region)

    def _kept_for_meetings(self, name: str, stored: Quantity, region: Region) -> Iterator[MemoryItem]:
        """Copies of a trained parameter of this size that a replica keeps from one synchronisation to the next."""
        if copies := self.training_state.meeting_copies:
            title = f"{numbers_out(name)}, kept for meetings"
            yield MemoryItem(title, "optimizer", region, copies * stored, name, is_stored=False)

    def _value_bytes(
        self, tensor: Tensor, how: ParameterPlan, stored: Quantity, resident: Quantity
    ) -> Iterator[tuple[Tier, Quantity, bool]]:
        """Yields tier, bytes, and whether they are the stored values, for the values of a parameter.

        Args:
            tensor: the parameter.
            how: layouts and tiers of the parameter.
            stored: bytes of the parameter in its storage layout.
            resident: bytes of the parameter in its resident layout.
        """
        if how.tier == "device":
            held = resident if _grows(how.storage, how.resident) else stored
            yield "device", stored + resident if tensor.is_cast else held, True
            return
        yield how.tier, stored, True
        if how.resident_tier != how.tier or tensor.is_cast or self._converts(how):
            yield how.resident_tier, resident, False

    def _owned(self, name: str, how: ParameterPlan) -> Iterator[MemoryItem]:
        """Memory of a parameter that one rank owns, on the rank that owns most; see `autopar.cost_model.owners`."""
        tensor = self.graph.tensors[self.graph.parameters[name]]
        region, count = self.place(name, name)
        for kind, size, is_stored in self._owned_bytes(tensor, how, count):
            tier = how.tier if is_stored else how.resident_tier
            if not (isinstance(size, int | float) and size == 0):
                updates = is_stored and tensor.needs_grad
                yield MemoryItem(numbers_out(name), kind, region, size, name, tier=tier, is_stored=updates)
        share = owned_share(how.storage, self.position, self.sizes)
        if tensor.needs_grad and share:
            stored = count * share * self.sizes.bytes(tensor.at_rest, how.storage)
            yield from self._kept_for_meetings(name, stored, region)

    def _owned_bytes(self, tensor: Tensor, how: ParameterPlan, count: Quantity) -> Iterator[tuple[str, Quantity, bool]]:
        """Yields kind of memory, its bytes for `count` parameters, and whether the optimizer reads or updates it.

        What the optimizer reads or updates lies in the tier of the storage, all else in the resident tier.
        """
        share = count * owned_share(how.storage, self.position, self.sizes)
        stored = share * self.sizes.bytes(tensor.at_rest, how.storage)
        if has_owner(how.resident):  # the other ranks have neither a copy nor a gradient
            count = count * owned_share(how.resident, self.position, self.sizes)
        copied = count * self.sizes.bytes(tensor, how.resident)
        in_one_tier = how.tier == how.resident_tier
        if is_own_copy(how.storage, how.resident) and in_one_tier and not tensor.is_cast:
            copied = copied - stored
        yield "parameters", stored, True
        yield "parameters", copied, False
        if not tensor.needs_grad:
            return
        arrived = share * self._arrived_bytes(tensor, how)
        yield "gradients", arrived, True
        if how.reduce == "step":  # on a rank that has both, `.grad` takes the place of the sum
            summed = count * self._summed_bytes(tensor, how.resident)
            yield "gradients", larger(0, summed - int(in_one_tier) * arrived), False
        state = self.training_state
        updated = share * state.optimizer_bytes(tensor.at_rest, how.storage, self.sizes)
        yield "optimizer", updated, True

    def _gradient_bytes(self, tensor: Tensor, how: ParameterPlan) -> Iterator[tuple[Tier, Quantity]]:
        """Bytes of a parameter's gradient, by tier.

        First the gradient is the sum over micro-batches; then `.grad` replaces it. `.grad` lies in the tier of the
        storage and has the parameter's stored dtype. Where gradients are reduced after every micro-batch, they are
        summed in `.grad`. Where a use gathers the parameter, the reduced shard stays on the device, or in the resident
        tier, until backward ends.
        """
        per_step, used = how.reduce == "step", how.resident_tier
        summed = self._summed_bytes(tensor, how.resident if per_step else how.storage)
        arrived = self._arrived_bytes(tensor, how)
        if how.tier == "device" or (how.tier == used and per_step and not self._converts(how)):
            yield how.tier, larger(summed, arrived) if self._widens(tensor) else summed
            return
        yield how.tier, arrived
        if per_step or used != "device" or any(state.kind == "S" for state in how.resident):
            yield used, summed

    def _summed_bytes(self, tensor: Tensor, layout: Layout) -> Quantity:
        """Bytes of a gradient's sum over micro-batches in a layout."""
        fresh = self.training_state.fresh_gradient_bytes / tensor.itemsize_bytes
        return (self._gradient_scale(tensor) + fresh) * self.sizes.bytes(tensor, layout)

    def _arrived_bytes(self, tensor: Tensor, how: ParameterPlan) -> Quantity:
        """Bytes of `.grad`, on a rank that has the stored parameter."""
        if self._widens(tensor):
            return self.sizes.bytes(tensor.at_rest, how.storage)
        return self._summed_bytes(tensor, how.storage)

    def _widens(self, tensor: Tensor) -> bool:
        """Whether `.grad`, in the stored parameter's dtype, has wider elements than the sum that it replaces."""
        own_bytes = tensor.gradient_scale * tensor.itemsize_bytes
        is_given = self.training_state.gradient_bytes is not None
        return not is_given and own_bytes < tensor.at_rest.itemsize_bytes

    def _cast(self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity) -> WorkItem:
        """The item of the cast of a stored shard to the dtype of its use, once per step."""
        moved = self.sizes.bytes(tensor.at_rest, how.storage)
        moved = moved + self.sizes.bytes(tensor, how.storage)
        if how.tier != "device":  # no rank runs ops alone then, so that the figures are those of the busiest owner
            count = count * owned_share(how.storage, self.position, self.sizes)
        return WorkItem(
            "casting parameters",
            "cast",
            COMPUTE,
            "gather",
            region,
            count,
            moved / self.hardware.updates_per_second(how.tier),
            moved,
            every_micro_batch=False,
            of=name,
            places=places_in(how.storage),
        )

    def _moves(
        self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity
    ) -> Iterator[WorkItem]:
        """Items of the moves of a stored shard to its resident tier, and of its gradient back.

        An owner moves what it owns, and no other rank anything: each of several owners its share.
        """
        share = owned_share(how.storage, self.position, self.sizes)
        if isinstance(share, int) and share == 0:
            return
        count = count * share
        item = partial(move_item, numbers_out(name), hardware=self.hardware, region=region, count=count, of=name)
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
                yield item(back, scale * size, phase="reduce", carries="gradient", every_micro_batch=often)

    def _converts(self, how: ParameterPlan) -> bool:
        """Whether a parameter's resident layout differs from its storage along an axis of several ranks.

        An axis whose size is a symbol or an array counts as an axis of several ranks.
        """
        sizes = (self.sizes.axis(axis) for axis in range(len(how.storage)))
        is_single = [isinstance(size, int) and size == 1 for size in sizes]
        states = zip(how.storage, how.resident, is_single, strict=True)
        return any(a != b and not single for a, b, single in states)

    def _accumulation(self, name: str, tensor: Tensor, how: ParameterPlan, region: Region, count: Quantity) -> WorkItem:
        """The item that adds a micro-batch's gradient to the accumulated one: it reads both and writes the sum."""
        held = self.sizes.bytes(tensor, how.resident)
        moved = held * (1 + 2 * self._gradient_scale(tensor))
        seconds = memory_seconds(moved, self.hardware)
        if how.resident_tier != "device":
            seconds = moved / self.hardware.updates_per_second(how.resident_tier)
        return WorkItem(
            "accumulating gradients",
            "accumulate",
            COMPUTE,
            "backward",
            region,
            count,
            seconds,
            moved,
            of=name,
            places=places_in(how.resident),
        )

    def _update(self, name: str, how: ParameterPlan, region: Region, count: Quantity) -> Iterator[WorkItem]:
        """The item of the optimizer's ops for a parameter, beside the bytes that they read and write.

        Its owner alone runs them where it has one; else every rank, for its shard.
        """
        if not self.hardware.update_seconds:
            return
        ops = self.training_state.optimizer.ops
        yield WorkItem(
            "updating parameters",
            "update",
            COMPUTE,
            "update",
            region,
            count,
            ops * self.hardware.update_seconds,
            0,
            kernels=ops,
            every_micro_batch=False,
            of=name,
            places=places_in(how.storage),
        )

    def meeting(self, name: str, how: ParameterPlan, meeting: Meeting, link: Link) -> Iterator[WorkItem]:
        """Items of one parameter in a meeting of replicas: the messages, and the update with the received values.

        Replicas take their mean by an all-reduce, or exchange messages with an asynchronous server. The update makes
        and takes messages (`Meeting.moves`).
        """
        tensor = self.graph.tensors[self.graph.parameters[name]]
        if not tensor.needs_grad:
            return
        region, count = self.place(name, name)
        share = owned_share(how.storage, self.position, self.sizes)
        stored = share * self.sizes.bytes(tensor.at_rest, how.storage)
        count = count / meeting.steps
        kind = "serve" if meeting.rule == SERVER else "all_reduce"
        seconds = collective_seconds(
            kind,
            before_bytes=stored,
            after_bytes=stored,
            ranks=meeting.replicas,
            link=link,
            hardware=self.hardware,
            bucketed=True,
            bucket_bytes=self.bucket_bytes,
        )
        sent = traffic_bytes(kind, before_bytes=stored, after_bytes=stored, ranks=meeting.replicas)
        yield WorkItem(
            f"{kind} {numbers_out(name)}",
            kind,
            meeting.axis,
            "meet",
            region,
            count,
            seconds,
            sent,
            kernels=0,
            carries="parameter",
            every_micro_batch=False,
            ranks=meeting.replicas,
            of=name,
        )
        moved = meeting.moves * stored
        yield WorkItem(
            "parameters of a meeting",
            "update",
            COMPUTE,
            "meet",
            region,
            count,
            memory_seconds(moved, self.hardware),
            moved,
            every_micro_batch=False,
            of=name,
        )


def _grows(storage: Layout, resident: Layout) -> bool:
    return any(a.kind == "S" and b.kind != "S" for a, b in zip(storage, resident, strict=True))
