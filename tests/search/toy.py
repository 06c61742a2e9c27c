"""A slow little machine on which splitting tiny tensors pays, and brute force over all plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autopar.cost_model import Hardware, Link
from autopar.ir import Graph, Layout, Mesh, ParameterPlan, Plan, R, S, State, V, divides, is_legal
from autopar.pipeline.composed import StepCost, cost_of

TOY = Hardware(
    name="toy",
    peak_flops=((8, 1e8),),
    memory_bytes_per_second=1e9,
    memory_bytes=10**12,
    launch_seconds=1e-9,
    devices_per_node=4,
    inside_node=Link(1e8, 1e-8),
    across_nodes=Link(1e7, 1e-7),
)


def all_plans(graph: Graph, axis_size: int, micro_batches: int = 1) -> Iterator[Plan]:
    """Every legal plan on one axis: all choices, all storages, all inputs."""
    mesh = Mesh.of({"x": axis_size})
    labels = [[c.label for c in op.choices if is_legal(graph, op, (c.label,), mesh)] for op in graph.ops]
    for chosen in itertools.product(*labels):
        ops = {op.name: (label,) for op, label in zip(graph.ops, chosen, strict=True)}
        parameters = [list(_parameter_plans(graph, name, ops, mesh)) for name in graph.parameters]
        inputs = [list(_input_layouts(graph, name, mesh)) for name in graph.inputs]
        for stored in itertools.product(*parameters):
            for taken in itertools.product(*inputs):
                yield Plan(
                    mesh,
                    "",
                    "auto",
                    micro_batches,
                    dict(zip(graph.parameters, stored, strict=True)),
                    dict(zip(graph.inputs, taken, strict=True)),
                    ops,
                )


def priced_plans(graph: Graph, axis_size: int, micro_batches: int = 1) -> list[tuple[Plan, StepCost]]:
    return [(plan, cost_of(graph, plan, TOY)) for plan in all_plans(graph, axis_size, micro_batches)]


def _parameter_plans(graph: Graph, name: str, ops: dict[str, tuple[str]], mesh: Mesh) -> Iterator[ParameterPlan]:
    tensor = graph.tensors[graph.parameters[name]]
    uses = {
        op.choice(ops[op.name][0]).operands[i]
        for op in graph.ops
        for i, operand in enumerate(op.operands)
        if operand == tensor.name
    }
    whole: State = R if uses <= {R} else V
    yield ParameterPlan((R,), (whole,))
    for dim in range(len(tensor.dims)):
        if divides(tensor.dims, (S(dim),), mesh):
            yield ParameterPlan((S(dim),), (whole,), "step")
            yield ParameterPlan((S(dim),), (whole,), "micro_batch")
            yield ParameterPlan((S(dim),), (S(dim),))


def _input_layouts(graph: Graph, name: str, mesh: Mesh) -> Iterator[Layout]:
    tensor = graph.tensors[graph.inputs[name]]
    yield (R,)
    for dim in range(len(tensor.dims)):
        if divides(tensor.dims, (S(dim),), mesh):
            yield (S(dim),)
