"""The order in which axes nest, for each op by itself.

Where several axes split one factor of an op, its operands and results are right in any order of the axes, as long as it
is the same one. Conversions are not alike in all orders: on two nodes, with `tp` between the nodes and `tq` inside of
each,

    P@tp P@tq -> S(1)@tp S(1)@tq      reduces whole tensors between the nodes, then half-sized ones inside
    P@tp P@tq -> S(1)@tq S(1)@tp      reduces whole tensors inside the nodes, and halves between them

Parameters keep the order of the mesh, in which DTensor nests shards. Ops that hand a tensor on without a conversion
make up a *group*, and nest alike. Starting from the order of the mesh, each group in turn takes the order in which the
conversions of its tensors take least, as long as one gains. The result counts if the step as a whole is shorter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.cost_model.collectives import conversion_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Labels, Layout, Op, Plan, nested_labels, operand_layouts, plain, result_layouts
from autopar.ir.choice import can_nest
from autopar.ir.note import Note
from autopar.pipeline.composed import composed
from autopar.search.request.connected import connected
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import counted, format_seconds

_WORTH = 1e-3  # least relative gain for which a plan has orders of its ops
_Group = Sequence[Op]


def with_nesting(found: Planned, request: Request) -> Planned:
    """The plan whose ops have the orders of axes that make its step shortest, and a note on the gain.

    The plan as it is where that is less than a thousandth, where it saves tensors in slices, and on a mesh with vacant
    places.
    """
    plan = found.plan
    if plan.saved or plan.mesh.occupied is not None:
        return found
    ops = NestingOfGroups(found.graph, plan, request.hardware).best()
    if ops == plan.ops:
        return found
    before, price = (composed(found.graph, each, **request.figures) for each in (plan, replace(plan, ops=ops)))
    bound = request.search_bound_bytes or math.inf
    is_shorter = price.step_seconds < (1 - _WORTH) * before.step_seconds
    if not is_shorter or price.peak_bytes > max(bound, before.peak_bytes):
        return found
    turned = sum(ops[name] != plan.ops[name] for name in ops)
    note = Note(
        f"{counted(turned, 'op')} split tensors over the axes in another order than the mesh lists them, which makes "
        f"collectives faster: a step takes {format_seconds(price.step_seconds)} instead of "
        f"{format_seconds(before.step_seconds)}",
        "axes",
    )
    return found.priced(replace(plan, ops=ops), price).noted(note)


class NestingOfGroups:
    """The choice of an order for every group of ops of a plan.

    Args:
        graph: the model.
        plan: the plan, whose choices stay.
        hardware: figures of the machine.
    """

    def __init__(self, graph: Graph, plan: Plan, hardware: Hardware) -> None:
        self.graph, self.plan, self.hardware = graph, plan, hardware
        self.sizes = Sizes(plan.mesh)
        self.ops: dict[str, Labels] = dict(plan.ops)
        self._seconds: dict[tuple[str, Layout, Layout], float] = {}

    def best(self) -> Mapping[str, Labels]:
        """The labels of all ops, with the depths of the orders that were found."""
        while any([self._improve(group) for group in self.groups]):
            pass
        return self.ops

    def _improve(self, group: _Group) -> bool:
        """Gives a group the order in which the conversions of its tensors take least; whether that is another."""
        tensors = dict.fromkeys(name for op in group for name in (*op.operands, *op.results))
        before = least = self.cost(tensors)
        chosen = {op.name: self.ops[op.name] for op in group}
        for order in itertools.permutations(range(len(self.plan.mesh.axes))):
            self.ops |= {op.name: nested_labels(self.ops[op.name], order) for op in group}
            cost = self.cost(tensors)
            if cost < least * (1 - _WORTH):
                least, chosen = cost, {op.name: self.ops[op.name] for op in group}
        self.ops |= chosen
        return least < before

    def cost(self, tensors: Iterable[str]) -> float:
        """Seconds of the conversions of some tensors, in all layers for which they stand."""
        return sum(
            self.graph.layer_count.get(name, 1) * self._conversion(name, self._produced(name), target)
            for name in tensors
            for target in dict.fromkeys(self._targets(name))
        )

    def _conversion(self, name: str, source: Layout, target: Layout) -> float:
        key = (name, source, target)
        if key not in self._seconds:
            self._seconds[key] = conversion_seconds(
                self.graph.tensors[name], source, target, sizes=self.sizes, hardware=self.hardware
            ).total
        return self._seconds[key]

    def _produced(self, name: str) -> Layout:
        """The layout in which a tensor is made, or comes into the step."""
        op = self.graph.producer.get(name)
        if op is None:
            return self._flow.produced[name]
        return result_layouts(op, self.ops[op.name])[op.results.index(name)]

    def _targets(self, name: str) -> Iterator[Layout]:
        """The layouts in which ops use a tensor, and in which the step returns it."""
        for op, position in self._uses.get(name, ()):
            yield operand_layouts(op, self.ops[op.name])[position]
        if name in self.graph.outputs:
            yield self.graph.delivered(self._produced(name))

    @cached_property
    def _flow(self) -> Flow:
        """The layouts at the order of the mesh, which are those of tensors that no op makes in any order."""
        return Flow(self.graph, self.plan)

    @cached_property
    def _uses(self) -> Mapping[str, list[tuple[Op, int]]]:
        """Tensor -> the ops that use it, each with the position of the operand."""
        found: dict[str, list[tuple[Op, int]]] = {}
        for op in self.graph.ops:
            for position, name in enumerate(op.operands):
                found.setdefault(name, []).append((op, position))
        return found

    @cached_property
    def groups(self) -> list[_Group]:
        """Ops with axes that may nest in several orders, grouped by the tensors that they share in one layout."""
        nesting = {op.name: op for op in self.graph.ops if _nests(self.plan.ops[op.name])}
        users = dict[tuple[str, Layout], str]()  # of each tensor in a layout, one op that makes or uses it
        pairs = ((op.name, users.setdefault(at, op.name)) for op in nesting.values() for at in self._places(op))
        return [[op for name, op in nesting.items() if name in group] for group in connected(nesting, pairs)]

    def _places(self, op: Op) -> Iterator[tuple[str, Layout]]:
        labels = self.plan.ops[op.name]
        yield from zip(op.operands, operand_layouts(op, labels), strict=True)
        yield from zip(op.results, result_layouts(op, labels), strict=True)


def _nests(labels: Labels) -> bool:
    """Whether several axes split the same factor of an op, so that they nest."""
    split = [plain(label) for label in labels if can_nest(label)]
    return len(set(split)) < len(split)
