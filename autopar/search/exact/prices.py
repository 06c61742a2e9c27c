"""The prices of single choices, which the programs of a search add up.

`autopar.cost_model.nodes` gives the items and holdings of one node. A price multiplies them by the number of nodes for
which a class or an entry of the folded graph stands. `autopar.cost_model.steps.step` composes them to the time and
memory of a whole step, for an assignment and for its plan alike.

[Note: exposure] The time of a step is not a plain sum, because communication overlaps with compute. Adding a second of
work to one plan's step therefore makes the step longer by some part of a second, the *slope*: for example 0 for
communication that is hidden behind compute. `MarginalCosts` has the slope of every kind of work at one plan. A program
that multiplies seconds by these slopes finds the best plan as long as the slopes are the same there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_model import Sizes
from autopar.cost_model.items import COMPUTE, TOUCHED, MemoryItem, Region, WorkItem, kind_of_work
from autopar.cost_model.memory import layers_of_ops
from autopar.cost_model.nodes import NodePricer
from autopar.cost_model.owners import busiest_owner
from autopar.cost_model.pricer import block_labels
from autopar.cost_model.steps.run import REGIONS, Run
from autopar.cost_model.steps.step import Step
from autopar.ir import Labels, Layout, ParameterPlan, R, Tier, TieredLayout
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.parts import blocks_of_ops, is_whole
from autopar.search.exact.fold import Fold
from autopar.search.exact.question import LayoutQuestion


@dataclass(frozen=True)
class MarginalCosts:
    """Slopes: the seconds by which a second of work makes a step longer; see [Note: exposure].

    Attributes:
        every: (region, kind of work) -> slope of work that every micro-batch does. Kinds are "compute",
            "stored" (communication of parameters and gradients), "activation" (communication of activations) and
            "move" (between memories); see `kind_of_work`.
        late: regions in which launching kernels takes the host longer than running them takes the device.
        reductions: slope of reductions that run once per step.
        backward: reduction of the slope of backward's compute in one micro-batch, because more of it hides more of
            the reductions once per step.
    """

    every: Mapping[tuple[Region, str], float]
    late: frozenset[Region] = frozenset()
    reductions: float = 1.0
    backward: float = 0.0

    @classmethod
    def least(cls, hides: float, hides_activations: float) -> MarginalCosts:
        """The slopes of a step in which everything hides that can: no step takes fewer seconds than these give.

        Args:
            hides, hides_activations: parts of the communication of parameters, and of activations, that can hide.
        """
        every = dict(cls.full().every)
        for region in REGIONS:
            every[region, "stored"] -= hides
            every[region, "activation"] -= hides_activations
        return cls(every, reductions=1 - hides)

    @classmethod
    def full(cls) -> MarginalCosts:
        """The slopes of a step without overlap: all are 1."""
        kinds = ("compute", "stored", "activation", "move")
        return cls({(region, kind): 1.0 for region in REGIONS for kind in kinds})

    @classmethod
    def of(cls, step: Step) -> MarginalCosts:
        """The slopes at the plan of a step."""
        software, hides = step.software, float(step.hides_stored)
        every, late = dict(cls.full().every), set()
        for region in REGIONS:
            sums = _sums(step, region)
            for kind, part in (("stored", hides), ("activation", software.hides_activations)):
                shorter = kind if sums[kind] <= sums["compute"] else "compute"
                every[region, shorter] -= part
            if step.is_late(region):
                late.add(region)
        reductions = sum(
            i.count * i.seconds
            for i in step.items
            if i.phase == "reduce" and not i.every_micro_batch and kind_of_work(i) == "stored"
        )
        is_short = bool(reductions <= step.backward_seconds())
        return cls(every, frozenset(late), 1 - hides * is_short, hides * (not is_short))

    def seconds(self, item: WorkItem, step: Step) -> float:
        """Seconds by which one execution of an item per micro-batch makes a step longer.

        Args:
            item: the item.
            step: step with the figures of the machine and the number of micro-batches; its items are not used.
        """
        if item.phase in ("gather", "update"):
            return float(item.seconds)
        if item.phase == "reduce" and not item.every_micro_batch:
            slope = self.reductions if kind_of_work(item) == "stored" else 1.0
            return slope * float(item.seconds)
        batches = float(step.run.micro_batches)
        issued = float(step.issue_seconds(item))
        if item.region in self.late:
            return batches * issued
        seconds = self.every[item.region, kind_of_work(item)] * float(item.seconds)
        if item.kernels and not step.software.runs_ahead:
            seconds += max(0.0, issued - float(item.seconds))
        if item.resource == COMPUTE and item.phase == "backward":
            seconds -= self.backward / batches * float(item.seconds)
        return batches * seconds


def _sums(step: Step, region: Region) -> dict[str, float]:
    sums = {"compute": 0.0, "stored": 0.0, "activation": 0.0, "move": 0.0}
    for resource in (COMPUTE, *step.axes):
        for item, times in step.runs(region, resource):
            sums[kind_of_work(item)] += float(times * item.count * item.seconds)
    return sums


def seconds_of(items: Iterable[WorkItem], exposure: MarginalCosts, step: Step) -> float:
    """Seconds by which all executions of these items make a step longer."""
    return sum(float(item.count) * exposure.seconds(item, step) for item in items)


def _scaled(items: Iterable[WorkItem], factor: float) -> tuple[WorkItem, ...]:
    """Items that are executed `factor` times as often."""
    if factor == 1:
        return tuple(items)
    return tuple(replace(item, count=factor * item.count) for item in items)


class Use(NamedTuple):
    """A use of a parameter.

    Attributes:
        kind, position: class of the op, and position of the parameter among its operands.
        block: index of the kind of block in which the op runs; None for a block that another of its kind stands for.
    """

    kind: int
    position: int
    block: int | None


class Prices:
    """Items and holdings of the classes and entries of a folded graph, with a cache.

    Attributes:
        step: a step without items, which has the figures of the machine and the number of micro-batches.
        blocks: for every kind of block, index of a class -> number of its ops in such a block.
        steps: steps of assignments that were composed before, see `autopar.search.exact.assignment_parts`.
    """

    def __init__(self, asked: LayoutQuestion, fold: Fold, sizes: Sizes) -> None:
        graph, mesh, state = asked.graph, asked.mesh.filled, asked.training_state
        machine = asked.software.on(asked.hardware)
        self.nodes = NodePricer(
            graph,
            sizes=sizes,
            hardware=machine,
            links=[machine.link(mesh, axis) for axis in range(len(mesh.axes))],
            training_state=state,
            position=busiest_owner(graph, asked.fixed_storage or {}, mesh),
            micro_batches=asked.micro_batches,
            chosen_bucket_bytes=asked.bucket_bytes,
        )
        run = Run(asked.micro_batches, training_state=state)
        layers = sum(stack.layers for stack in graph.stacks) or 1
        self.step = Step((), (), run, machine, asked.software, layers=layers)
        self.graph, self.fold, self.sizes, self.mesh = graph, fold, sizes, mesh
        self._names = {tensor: name for name, tensor in graph.parameters.items()}
        self._ops: dict[tuple[int, Labels], tuple[WorkItem, ...]] = {}
        self._conversions: dict[tuple[int, TieredLayout, Layout], tuple[WorkItem, ...]] = {}
        self._parameters: dict[object, tuple[tuple[WorkItem, ...], tuple[MemoryItem, ...]]] = {}
        self._every: dict[object, tuple[WorkItem, ...]] = {}
        self._all_parameters: dict[object, tuple[tuple[WorkItem, ...], tuple[MemoryItem, ...]]] = {}
        self._gathered: dict[tuple[int, TieredLayout, Layout], float] = {}
        self._working: dict[tuple[int, Labels], float] = {}
        self.steps: dict[object, Step] = {}
        self._kinds = self._number_kinds()
        self.blocks, self._uses = self._find_blocks()

    # --- nodes

    def op(self, index: int, labels: Labels) -> tuple[WorkItem, ...]:
        """Items of all ops of a class."""
        key = (index, labels)
        if key not in self._ops:
            each = self.fold.classes[index]
            scale = each.count / self.nodes.place(each.op.name, each.op.module)[1]
            items = self.nodes.op(each.op, labels)
            self._ops[key] = _scaled(items, scale)
        return self._ops[key]

    def conversion(self, index: int, source: TieredLayout, target: Layout) -> tuple[WorkItem, ...]:
        """Items of the conversion of one tensor of an entry."""
        if source == TieredLayout(target):
            return ()
        key = (self._kinds[index], source, target)
        if key not in self._conversions:
            entry = self.fold.entries[index]
            name = entry.names[0]
            again = entry.leaf == "parameter" and entry.is_saved
            items = self.nodes.conversion(name, source, target, "", again=again)
            one = self.nodes.place(name, self.nodes.modules.get(name, ""))[1]
            once = items if one == 1 else (replace(i, count=i.count / one) for i in items)
            self._conversions[key] = tuple(once)
        return self._conversions[key]

    def parameter(self, index: int, how: ParameterPlan) -> tuple[tuple[WorkItem, ...], tuple[MemoryItem, ...]]:
        """Items and holdings of one parameter of an entry, stored in this way."""
        key = (self._kinds[index], how)
        if key not in self._parameters:
            name = self._names[self.fold.entries[index].names[0]]
            one = self.nodes.place(name, name)[1]
            items, held = self.nodes.between_steps(name, how), self.nodes.parameter(name, how)
            self._parameters[key] = (
                tuple(replace(i, count=i.count / one) for i in items),
                tuple(replace(h, bytes=h.bytes / one) for h in held),
            )
        return self._parameters[key]

    def conversions(self, index: int, source: TieredLayout, target: Layout) -> tuple[WorkItem, ...]:
        """Items of the conversions of all tensors of an entry."""
        key, count = (self._kinds[index], source, target), self.fold.entries[index].count
        if (count, key) not in self._every:
            items = self.conversion(index, source, target)
            self._every[count, key] = _scaled(items, count)
        return self._every[count, key]

    def parameters(self, index: int, how: ParameterPlan) -> tuple[tuple[WorkItem, ...], tuple[MemoryItem, ...]]:
        """Items and holdings of all parameters of an entry, stored in this way."""
        key, count = (self._kinds[index], how), self.fold.entries[index].count
        if (count, key) not in self._all_parameters:
            items, held = self.parameter(index, how)
            self._all_parameters[count, key] = (
                tuple(replace(i, count=count * i.count) for i in items),
                tuple(replace(h, bytes=h.bytes * count) for h in held),
            )
        return self._all_parameters[count, key]

    def kind(self, index: int) -> int:
        """A number that is equal for entries with equal prices."""
        return self._kinds[index]

    def optimizer_seconds(self, holdings: Iterable[MemoryItem]) -> float:
        """Seconds of the optimizer's update, given the holdings of a parameter."""
        touched: dict[Tier, float] = {}
        for h in holdings:
            times = TOUCHED.get(h.kind, 0) * h.is_stored
            touched[h.tier] = touched.get(h.tier, 0.0) + times * h.bytes
        rate = self.step.hardware.updates_per_second
        return float(sum(size / rate(tier) for tier, size in touched.items()))

    # --- what is there for a moment

    def gathered_bytes(self, index: int, source: TieredLayout, target: Layout) -> float:
        """Bytes of the copies that a use of one parameter of an entry gathers."""
        key = (index, source, target)
        if key not in self._gathered:
            held = self.nodes.gathered(self.fold.entries[index].names[0], source, target, "", "")
            self._gathered[key] = sum(float(h.bytes) for h in held)
        return self._gathered[key]

    def working_bytes(self, index: int, labels: Labels) -> float:
        """Bytes that one op of a class needs only while it runs."""
        key = (index, labels)
        if key not in self._working:
            held = self.nodes.working(self.fold.classes[index].op, labels, "")
            self._working[key] = sum(float(h.bytes) for h in held)
        return self._working[key]

    def uses(self, index: int) -> Mapping[tuple[Use, ...], int]:
        """The uses of one parameter of an entry, in order -> number of its parameters that are used so."""
        return self._uses.get(index, {})

    def blocks_using(self, index: int) -> Mapping[int, int]:
        """Index of a kind of block -> number of parameters of an entry that are first used in such a block."""
        found: Counter[int] = Counter()
        for (first, *_), count in self.uses(index).items():
            if first.block is not None:
                found[first.block] += count
        return found

    # --- the graph

    def _number_kinds(self) -> list[int]:
        """For every entry a number that is equal for entries with equal prices."""
        numbers: dict[object, int] = {}
        found = []
        for entry in self.fold.entries:
            tensor, name = entry.tensor, entry.names[0]
            is_parameter = entry.leaf == "parameter"
            region = self.nodes.place(name, self.nodes.modules.get(name, ""))[0]
            key = (
                tensor.dims,
                tensor.formats,
                tensor.needs_grad,
                is_parameter,
                is_parameter and entry.is_saved,
                region,
                self.graph.lookups.get(name),
            )
            found.append(numbers.setdefault(key, len(numbers)))
        return found

    def _find_blocks(self) -> tuple[list[Mapping[int, int]], dict[int, Counter[tuple[Use, ...]]]]:
        graph, fold = self.graph, self.fold
        is_known = has_blocks(graph) and is_whole(graph)
        blocks = blocks_of_ops(graph) if is_known else layers_of_ops(graph)
        labels = block_labels(graph, blocks)
        counts: dict[object, Counter[int]] = {}
        for op in graph.ops:
            counts.setdefault(labels[op.name], Counter())[fold.class_of[op.name]] += 1
        kinds = {tuple(sorted(c.items())): label for label, c in reversed(counts.items())}
        number = {label: i for i, label in enumerate(kinds.values())}
        found: dict[str, list[Use]] = {}
        for op in graph.ops:
            at = number.get(labels[op.name])
            for position, name in enumerate(op.operands):
                if name in self._names:
                    found.setdefault(name, []).append(Use(fold.class_of[op.name], position, at))
        uses = {
            index: Counter(tuple(found[name]) for name in entry.names if name in found)
            for index, entry in enumerate(fold.entries)
            if entry.leaf == "parameter"
        }
        return [dict(kind) for kind in kinds], uses

    def buffers(self) -> Iterator[MemoryItem]:
        """Memory of buffers, whole on every rank, and of the runtime's buckets of gradients."""
        whole = tuple(R for _ in self.mesh.axes)
        for public, name in self.graph.buffers.items():
            region, count = self.nodes.place(name, public)
            held = count * self.sizes.bytes(self.graph.tensors[name], whole)
            yield MemoryItem(public, "buffers", region, held, name)
        yield from self.nodes.buckets()
