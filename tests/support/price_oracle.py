"""The price of a whole plan, as a plain sum over its nodes. Tests compare the search's prices with it.

    seconds of a step = micro-batches * (every op, its own collectives, every conversion in the graph)
                        + every parameter's conversion from storage to resident layout, and its gradient's back

Communication does not overlap with compute here. The graph has the size of one micro-batch. A tensor is converted once
for each distinct layout that its consumers need. A parameter that is gathered for its uses and saved for backward is
gathered a second time in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.collectives import (
    Seconds,
    collective_seconds,
    communicates,
    conversion_seconds,
    own_collectives,
)
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.memory import ParameterBytes, keeps, parameter_bytes
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Labels, Layout, Op, ParameterPlan, Plan, Tensor, steps


@dataclass(frozen=True)
class Cost:
    """Time of a training step and memory of a rank, by kind.

    Attributes:
        compute_seconds: ops, forward and backward.
        conversion_seconds: conversions of activations and their gradients, and the collectives inside ops.
        parameter_seconds: conversions of parameters and their gradients.
        parameter_bytes, gradient_bytes, optimizer_bytes, saved_bytes, buffer_bytes: see
            `autopar.cost_model.memory`.
    """

    compute_seconds: float
    conversion_seconds: float
    parameter_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    buffer_bytes: int

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.compute_seconds + self.conversion_seconds + self.parameter_seconds

    @property
    def memory_bytes(self) -> int:
        """Memory of a rank."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.saved_bytes + self.buffer_bytes


def price(graph: Graph, plan: Plan, hardware: Hardware) -> Cost:
    """Time and memory of a plan. Raises KeyError if the plan has no labels for an op of the graph."""
    pricer = _Pricer(graph, plan, hardware)
    in_graph = pricer.conversions()
    stored = [(graph.layer_count.get(name, 1), pricer.parameter_bytes(name)) for name in graph.parameters]
    return Cost(
        compute_seconds=plan.micro_batches * pricer.compute_seconds(),
        conversion_seconds=plan.micro_batches * (in_graph.activations + pricer.own_seconds()),
        parameter_seconds=plan.micro_batches * in_graph.parameters
        + sum(graph.layer_count.get(name, 1) * pricer.per_step_seconds(name) for name in graph.parameters),
        parameter_bytes=sum(count * each.parameter for count, each in stored),
        gradient_bytes=sum(count * each.gradient for count, each in stored),
        optimizer_bytes=sum(count * each.optimizer for count, each in stored),
        saved_bytes=pricer.saved_bytes(),
        buffer_bytes=sum(pricer.whole_bytes(name) for name in graph.buffers.values()),
    )


def per_step_seconds(
    tensor: Tensor, plan: ParameterPlan, micro_batches: int, *, sizes: Sizes, hardware: Hardware
) -> float:
    """Seconds per step to convert a parameter from its storage to its resident layout, and its gradient back."""
    seconds = conversion_seconds(tensor, plan.storage, plan.resident, sizes=sizes, hardware=hardware, bucketed=True)
    times = micro_batches if plan.reduce == "micro_batch" else 1
    return seconds.forward + times * seconds.backward


def use_seconds(
    tensor: Tensor, resident: Layout, target: Layout, saved: bool, *, sizes: Sizes, hardware: Hardware
) -> float:
    """Seconds to convert a parameter from its resident layout to the layout of a use, and its gradient back.

    A copy whose conversion communicates is freed after the use: if autograd has `saved` it, backward converts it again.
    """
    seconds = conversion_seconds(tensor, resident, target, sizes=sizes, hardware=hardware)
    again = saved and tensor.needs_grad and any(map(communicates, steps(resident, target)))
    return seconds.total + (seconds.forward if again else 0.0)


@dataclass(frozen=True)
class _InGraph:
    activations: float
    parameters: float


class _Pricer:
    """Sums over the nodes of a graph under a plan."""

    def __init__(self, graph: Graph, plan: Plan, hardware: Hardware) -> None:
        self.graph = graph
        self.plan = plan
        self.hardware = hardware
        self.sizes = Sizes(plan.mesh)
        self.flow = Flow(graph, plan)

    def count(self, name: str) -> int:
        """Number of layers for which the op or tensor called `name` stands."""
        return self.graph.layer_count.get(name, 1)

    def compute_seconds(self) -> float:
        return sum(
            self.count(op.name)
            * op_seconds(op, self.plan.ops[op.name], self.graph.tensors, sizes=self.sizes, hardware=self.hardware).total
            for op in self.graph.ops
        )

    def own_seconds(self) -> float:
        return sum(
            self.count(op.name)
            * own_seconds(op, self.plan.ops[op.name], sizes=self.sizes, hardware=self.hardware).total
            for op in self.graph.ops
        )

    def conversions(self) -> _InGraph:
        produced = self.flow.produced
        parameters = set(self.graph.parameters.values())
        kept = self.flow.saved_roots
        seconds = {True: 0.0, False: 0.0}
        for name, targets in self.flow.targets.items():
            tensor, source = self.graph.tensors[name], produced[name]
            for target in targets:
                if name in parameters:
                    cost = use_seconds(tensor, source, target, name in kept, sizes=self.sizes, hardware=self.hardware)
                else:
                    cost = self._convert(tensor, source, target).total
                seconds[name in parameters] += self.count(name) * cost
        return _InGraph(activations=seconds[False], parameters=seconds[True])

    def _convert(self, tensor: Tensor, source: Layout, target: Layout) -> Seconds:
        return conversion_seconds(tensor, source, target, sizes=self.sizes, hardware=self.hardware)

    def per_step_seconds(self, name: str) -> float:
        tensor, plan = self.graph.tensors[self.graph.parameters[name]], self.plan.parameters[name]
        return per_step_seconds(tensor, plan, self.plan.micro_batches, sizes=self.sizes, hardware=self.hardware)

    def parameter_bytes(self, name: str) -> ParameterBytes:
        tensor = self.graph.tensors[self.graph.parameters[name]]
        return parameter_bytes(tensor, self.plan.parameters[name], self.sizes)

    def whole_bytes(self, name: str) -> int:
        return self.sizes.bytes(self.graph.tensors[name], self.flow.whole)

    def saved_bytes(self) -> int:
        stored = {*self.graph.parameters.values(), *self.graph.buffers.values()}
        seen: dict[tuple[str, Layout], int] = {}
        for op in self.graph.ops:
            if not keeps(op, self.graph.tensors):
                continue
            names = (*op.operands, *op.results)
            layouts = (*self.flow.operands[op.name], *self.flow.results[op.name])
            for name, layout in zip(names, layouts, strict=True):
                if name in op.saved and self.flow.saved.root(name) not in stored:
                    root, at = self.flow.saved.memory(name, layout)
                    seen[root, at] = self.count(root) * self.sizes.bytes(self.graph.tensors[root], at)
        return sum(seen.values())


def own_seconds(op: Op, labels: Labels, *, sizes: Sizes, hardware: Hardware) -> Seconds:
    """Seconds of the collectives that `op` runs as part of its computation, without conversions of its operands."""
    forward = backward = 0.0
    for axis, name, back, before, after in own_collectives(op, labels, sizes):
        link, ranks = hardware.link(sizes.mesh, axis), sizes.axis(axis)
        if name:
            forward += collective_seconds(
                name, before_bytes=before, after_bytes=after, ranks=ranks, link=link, hardware=hardware
            )
        if back:
            backward += collective_seconds(
                back, before_bytes=after, after_bytes=before, ranks=ranks, link=link, hardware=hardware
            )
    return Seconds(forward, backward)
