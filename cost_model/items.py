"""Everything a step does and everything a rank holds, as two flat lists of priced items.

Whatever is said about a plan's cost (a sum, a breakdown, a timeline) is a grouping of these lists.
With `Sizes` and a `Hardware` of numbers the prices are numbers; with symbols they are expressions.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.arith import Quantity, larger, smaller
from autopar.cost_model.collectives import BUCKET_BYTES, collective_seconds, own_collectives
from autopar.cost_model.compute import OpPrice, inner_tensors, memory_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.hardware import Hardware, Link
from autopar.cost_model.memory import keeps, layers_of_ops, recomputed_ops
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.traffic import sends, traffic_bytes
from autopar.ir import (
    Graph,
    Layout,
    Op,
    Plan,
    Tensor,
    steps,
)

Region = Literal["before", "layers", "after"]
Phase = Literal["forward", "backward", "gather", "reduce"]
COMPUTE = "compute"


@dataclass(frozen=True)
class Item:
    """Work of one kind on one resource of a rank.

    Attributes:
        name: the op's kind, or the collective with what it moves, block numbers left out.
        kind: the op's kind or the collective.
        resource: "compute", or the mesh axis a collective runs along.
        phase: forward and backward run once a micro-batch, gather once a step; reduce once a
            step, or once a micro-batch where `every_micro_batch`.
        region: before, in or after the repeated layers.
        count: how many of them a phase has.
        seconds: of one.
        traffic_bytes: of one: read and written in the device's memory, or sent over the link.
        flops: of one.
        kernels: that the host issues for one.
        carries: "activation", "parameter" or "gradient", "" for compute.
        every_micro_batch: whether it runs once a micro-batch.
        ranks: number of participating ranks.
        of: the op that it is or that first needs it; the parameter's name for its gradients' sums, gathers
            and reductions.
        recomputed: change of its number of executions where its layer is recomputed: 1 for work of
            forward that recomputation repeats; 0 for work that it does not; -1 for a gather that backward
            no longer needs, because the recomputed forward has made it.
    """

    name: str
    kind: str
    resource: str
    phase: Phase
    region: Region
    count: Quantity
    seconds: Quantity
    traffic_bytes: Quantity
    flops: Quantity = 0
    kernels: int = 1
    carries: str = ""
    every_micro_batch: bool = True
    ranks: Quantity = 1
    of: str = ""
    recomputed: int = 0


@dataclass(frozen=True)
class Holding:
    """Memory of one kind on a rank.

    Attributes:
        name: the parameter, or the op that keeps it.
        kind: "parameters", "gradients", "optimizer", "saved activations", "buffers".
        region: before, in or after the repeated layers.
        bytes: of all that the item stands for.
        of: the op that first keeps it, the parameter's name, or the tensor of a buffer.
    """

    name: str
    kind: str
    region: Region
    bytes: Quantity
    of: str = ""


@dataclass(frozen=True)
class TrainingState:
    """Bytes per element of what training keeps beside a parameter of the captured graph.

    Where a graph was captured under a mixed-precision policy, its tensors tell (`Tensor.at_rest`,
    `Tensor.gradient`), and `FULL` is right. The others are for graphs whose parameters were in the format
    of their use from the start, as of models described in bfloat16: what their optimizer then holds.

    Attributes:
        gradient_bytes: of a gradient; None for the parameter's own format.
        fresh_gradient_bytes: of the gradient of one micro-batch that stays beside the sum; 0 for none.
        master_bytes: of a second copy of the parameter that the optimizer updates; 0 for none.
        moment_bytes: of both moments of Adam together; None for two in the parameter's own format.
    """

    gradient_bytes: int | None = None
    master_bytes: int = 0
    moment_bytes: int | None = None
    fresh_gradient_bytes: int = 0


FULL = TrainingState()
# Micikevicius et al. 2018, section 3.1, as Megatron-LM and ZeRO (section 3.1) count it: 2 + 2 + 12.
MIXED = TrainingState(gradient_bytes=2, master_bytes=4, moment_bytes=8)
# The same with gradients accumulated in float32 (nanotron, Megatron-Core): 2 + 4 + 12.
MIXED_FLOAT32_GRADIENTS = TrainingState(gradient_bytes=4, master_bytes=4, moment_bytes=8)
# nanotron adds the gradient of a micro-batch, in bfloat16, to the sum, and lets none of them go.
MIXED_BOTH_GRADIENTS = TrainingState(4, 4, 8, fresh_gradient_bytes=2)


class Pricer:
    """Prices a plan node by node.

    Args:
        graph: the captured model.
        plan: its choices.
        sizes: of its tensors on a rank.
        hardware: figures or symbols.
        links: of every mesh axis, figures or symbols.
        layers: number of layers of every stack, by path, where it is not the graph's own: a symbol.
        training_state: of what training keeps beside parameters.
        fused: whether chains of element-wise ops are one kernel, as a compiler makes them.
        regathers: whether an activation that is gathered for an op is kept in shards, and gathered
            again in backward (Korthikanti et al. 2022, section 4.2.2).
        bucket_bytes: of the collectives that parameters and gradients share.
        blocks: op -> the block with which it is recomputed; by default its layer. Ops that are missing
            belong to none and are never recomputed.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        sizes: Sizes,
        hardware: Hardware,
        links: Sequence[Link],
        layers: Mapping[str, Quantity] | None = None,
        training_state: TrainingState = FULL,
        fused: bool = False,
        regathers: bool = False,
        bucket_bytes: float = BUCKET_BYTES,
        blocks: Mapping[str, Hashable] | None = None,
    ) -> None:
        self.regathers, self.bucket_bytes = regathers, bucket_bytes
        self.graph, self.plan, self.sizes = graph, plan, sizes
        self.hardware, self.links, self.training_state = hardware, tuple(links), training_state
        self.layers = {stack.path: stack.layers for stack in graph.stacks} | dict(layers or {})
        self.flow = Flow(graph, plan)
        self.inner = inner_tensors(graph) if fused else frozenset()
        self.regions = _regions(graph)
        self.recomputed = recomputed_ops(graph, layers_of_ops(graph) if blocks is None else blocks)
        self.modules = {name: op.module for op in graph.ops for name in op.results}
        self.modules |= {tensor: name for name, tensor in graph.parameters.items()}

    def items(self) -> Iterator[Item]:
        """What a step does."""
        for op in self.graph.ops:
            yield from self._compute(op)
            yield from self._own_collectives(op)
        yield from self._conversions()
        for name in self.graph.parameters:
            yield from self._between_steps(name)

    def holdings(self) -> Iterator[Holding]:
        """What a rank holds: parameters with what training keeps, and saved activations once."""
        for name in self.graph.parameters:
            yield from self._parameter(name)
        for public, name in self.graph.buffers.items():
            region, count = self._place(name, public)
            held = count * self.sizes.bytes(self.graph.tensors[name], self.flow.whole)
            yield Holding(_numbers_out(public), "buffers", region, held, name)
        yield from self._gathered()
        yield from self._saved()

    def boundary_bytes(self) -> Quantity:
        """Bytes of what crosses from one repeated layer to the next, on one rank."""
        produced, largest = self.flow.produced, 0
        for names in _crossing(self.graph).values():
            held = sum(
                (self.sizes.bytes(self.graph.tensors[n], produced[n]) for n in names), start=0
            )
            largest = larger(largest, held)
        return largest

    def into(self, op: Op, position: int) -> Iterator[Item]:
        """The forward of the conversion that an operand of `op` goes through."""
        name = op.operands[position]
        parameters = self.graph.parameters.values()
        carries = "parameter" if name in parameters else "activation"
        source, target = self.flow.produced[name], self.flow.operands[op.name][position]
        for item in self._convert(name, source, target, carries, op.name, False):
            if item.phase == "forward":
                yield item

    # --- ops

    def _compute(self, op: Op) -> Iterator[Item]:
        labels, tensors = self.plan.ops[op.name], self.graph.tensors
        region, count = self._place(op.name, op.module)
        name = _words(op)
        pricing = OpPrice.of(op, labels, tensors, self.sizes, self.hardware, self.inner)
        kernels = int(not self.inner.issuperset(op.results))
        for phase, part in (("forward", pricing.forward), ("backward", pricing.backward)):
            if part.passes and (kernels or not op.is_view):
                yield Item(
                    name, op.kind, COMPUTE, phase, region, count * part.passes,  # type: ignore[arg-type]
                    part.seconds, part.traffic_bytes, part.flops, kernels, of=op.name,
                    recomputed=self._recomputed(op.name, phase),
                )  # fmt: skip

    def _own_collectives(self, op: Op) -> Iterator[Item]:
        """What the parts of an op send each other inside it."""
        region, count = self._place(op.name, op.module)
        title = f"inside {_words(op)}"
        for axis, forward, backward, before, after in own_collectives(
            op, self.plan.ops[op.name], self.sizes
        ):
            yield self._item(
                title, forward, axis, "forward", region, count, before, after, "activation", of=op.name
            )  # fmt: skip
            if backward:
                yield self._item(
                    title, backward, axis, "backward", region, count, after, before, "activation",
                    of=op.name,
                )  # fmt: skip

    # --- conversions

    def _conversions(self) -> Iterator[Item]:
        produced, kept = self.flow.produced, self.flow.saved_roots
        parameters = set(self.graph.parameters.values())
        for name, targets in self.flow.targets.items():
            carries = "parameter" if name in parameters else "activation"
            for target, user in targets.items():
                again = name in kept and (carries == "parameter" or self.regathers)
                yield from self._convert(name, produced[name], target, carries, user, again)

    def _convert(
        self, name: str, source: Layout, target: Layout, carries: str, user: str, again: bool
    ) -> Iterator[Item]:
        """A conversion inside the graph for the op `user`; what is gathered may be gathered `again` in
        backward.
        """
        tensor = self.graph.tensors[name]
        region, count = self._place(name, self.modules.get(name, ""))
        title = self._title(name)
        for axis, forward, backward, before, after in self._steps(tensor, source, target):
            yield self._item(
                title, forward, axis, "forward", region, count, before, after, carries, of=user
            )
            if tensor.needs_grad:
                back = "gradient" if carries == "parameter" else carries
                scale = self._gradient_scale(tensor) if carries == "parameter" else 1
                yield self._item(
                    title, backward, axis, "backward", region, count, after * scale, before * scale,
                    back, of=user,
                )  # fmt: skip
            if again and tensor.needs_grad and forward == "all_gather":
                spared = carries == "parameter" and user in self.recomputed
                yield self._item(
                    title, forward, axis, "backward", region, count, before, after, carries, of=user,
                    recomputed=-int(spared),
                )  # fmt: skip

    def _recomputed(self, op: str, phase: str) -> int:
        """See `Item.recomputed`."""
        return int(phase == "forward" and op in self.recomputed)

    def _between_steps(self, name: str) -> Iterator[Item]:
        """A parameter's way from storage to its resident layout, and its gradient's way back."""
        how, tensor = self.plan.parameters[name], self.graph.tensors[self.graph.parameters[name]]
        region, count = self._place(name, name)
        title = _numbers_out(name)
        if tensor.needs_grad:
            yield self._accumulation(name, tensor, how.resident, region, count)
        if tensor.is_cast:
            yield self._cast(name, tensor, how.storage, region, count)
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

    def _gradient_scale(self, tensor: Tensor) -> float:
        """Bytes of a parameter's gradient for each of its own."""
        given = self.training_state.gradient_bytes
        return tensor.gradient_scale if given is None else given / tensor.itemsize_bytes

    def _cast(
        self, name: str, tensor: Tensor, storage: Layout, region: Region, count: Quantity
    ) -> Item:
        """Once a step the stored shard is read, and written in the format that it is used in."""
        moved = self.sizes.bytes(tensor.at_rest, storage) + self.sizes.bytes(tensor, storage)
        return Item(
            "casting parameters", "cast", COMPUTE, "gather", region, count,
            memory_seconds(moved, self.hardware), moved, every_micro_batch=False, of=name,
        )  # fmt: skip

    def _accumulation(
        self, name: str, tensor: Tensor, resident: Layout, region: Region, count: Quantity
    ) -> Item:
        """Adding a micro-batch's gradient to the sum: both are read, the sum is written."""
        held = self.sizes.bytes(tensor, resident)
        scale = self._gradient_scale(tensor)
        moved = held * (1 + 2 * scale)
        return Item(
            "accumulating gradients", "accumulate", COMPUTE, "backward", region, count,
            memory_seconds(moved, self.hardware), moved, of=name,
        )  # fmt: skip

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
            f"{name} {title}", name, COMPUTE if local else self.plan.mesh.names[axis], phase, region,
            count, seconds, sent, kernels=int(carries == "activation"),
            carries="" if local else carries,
            every_micro_batch=every_micro_batch, ranks=1 if local else ranks, of=of,
            recomputed=self._recomputed(of, phase) if recomputed is None else recomputed,
        )  # fmt: skip

    # --- memory

    def _parameter(self, name: str) -> Iterator[Holding]:
        how, tensor = self.plan.parameters[name], self.graph.tensors[self.graph.parameters[name]]
        region, count = self._place(name, name)
        stored = count * self.sizes.bytes(tensor.at_rest, how.storage)
        resident = count * self.sizes.bytes(tensor, how.resident)
        title = _numbers_out(name)
        held = resident if _grows(how.storage, how.resident) else stored
        held = stored + resident if tensor.is_cast else held
        yield Holding(title, "parameters", region, held, name)
        if not tensor.needs_grad:
            return
        size, training_state = tensor.at_rest.itemsize_bytes, self.training_state
        moments = 2 * size if training_state.moment_bytes is None else training_state.moment_bytes
        accumulated = how.storage if how.reduce == "micro_batch" else how.resident
        gradient = self._gradient_scale(tensor) + (
            training_state.fresh_gradient_bytes / tensor.itemsize_bytes
        )
        summed = gradient * count * self.sizes.bytes(tensor, accumulated)
        yield Holding(title, "gradients", region, summed, name)
        yield Holding(
            title,
            "optimizer",
            region,
            (training_state.master_bytes + moments) / size * stored,
            name,
        )

    def _gathered(self) -> Iterator[Holding]:
        """Copies of parameters that a use gathers, nothing for an axis of one rank."""
        produced, targets = self.flow.produced, self.flow.targets
        for name in self.graph.parameters.values():
            region, count = self._place(name, self.modules[name])
            for target, user in targets.get(name, {}).items():
                for axis, forward, _, _, after in self._steps(
                    self.graph.tensors[name], produced[name], target
                ):
                    if sends(forward):
                        held = count * after * smaller(1, self.sizes.axis(axis) - 1)
                        title = _numbers_out(self.modules[name])
                        yield Holding(title, "gathered", region, held, user)

    def _saved(self) -> Iterator[Holding]:
        stored = {*self.graph.parameters.values(), *self.graph.buffers.values()}
        seen: dict[tuple[str, Layout], Op] = {}
        for op in self.graph.ops:
            if not keeps(op, self.graph.tensors):
                continue
            names = (*op.operands, *op.results)
            operands = self.flow.operands[op.name]
            if self.regathers:
                operands = tuple(map(self._shards, op.operands, operands))
            layouts = (*operands, *self.flow.results[op.name])
            for name, layout in zip(names, layouts, strict=True):
                if name in op.saved and self.flow.saved.root(name) not in stored:
                    seen.setdefault(self.flow.saved.memory(name, layout), op)
        for (root, at), op in seen.items():
            region, count = self._place(op.name, op.module)
            held = count * self.sizes.bytes(self.graph.tensors[root], at)
            title = _words(op)
            yield Holding(title, "saved activations", region, held, op.name)

    def _shards(self, name: str, layout: Layout) -> Layout:
        """An operand as its maker left it on the axes along which it is gathered for a use."""
        made = self.flow.produced[name]
        return tuple(a if a.kind == "S" and b.kind in ("R", "V") else b
                     for a, b in zip(made, layout, strict=True))  # fmt: skip

    # --- the graph

    def _place(self, name: str, module: str) -> tuple[Region, Quantity]:
        """Where an op or tensor stands, and how many it stands for."""
        place = self.graph.stack_of(module)
        if place is None:
            return self.regions.get(name, "before"), 1
        stack, index = place
        return "layers", self.layers[
            stack.path
        ] - stack.captured + 1 if index == stack.middle else 1

    def _title(self, name: str) -> str:
        """A tensor in a reader's words: the parameter's name, or what makes it."""
        if name in self.graph.producer:
            op = self.graph.producer[name]
            return f"of {_words(op)}"
        return _numbers_out(self.modules.get(name, name))


def _crossing(graph: Graph) -> dict[str, dict[str, None]]:
    """Of every stack the tensors that the layer before its middle makes for that in the middle."""
    found: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        place = graph.stack_of(op.module)
        for name in op.operands:
            maker = graph.producer.get(name)
            source = graph.stack_of(maker.module) if maker else None
            if place is None or source is None or source[0] != place[0]:
                continue
            if (source[1], place[1]) == (place[0].middle - 1, place[0].middle):
                found.setdefault(place[0].path, {})[name] = None
    return found


def _grows(storage: Layout, resident: Layout) -> bool:
    return any(a.kind == "S" and b.kind != "S" for a, b in zip(storage, resident, strict=True))


def _regions(graph: Graph) -> dict[str, Region]:
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


def _numbers_out(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", "*", name)


def _words(op: Op) -> str:
    """An op in a reader's words: `mlp linear`, or `sum` outside every module."""
    return f"{_leaf(op.module)} {op.kind.removeprefix('aten.')}".strip()


def _leaf(module: str) -> str:
    """The last two names of a module's path, numbers left out: `mlp.up`."""
    names = [part for part in module.split(".") if not part.isdigit()]
    return ".".join(names[-2:])
