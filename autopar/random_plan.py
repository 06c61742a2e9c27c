"""Plans drawn at random: every choice of every op, every storage, every residence.

The parity of such plans with the single-device model is the test the project stands on.
"""

from __future__ import annotations

import random

from autopar.ir import (
    UNSPLIT,
    WHOLE,
    Graph,
    Labels,
    Layout,
    Mesh,
    Op,
    ParameterPlan,
    Plan,
    R,
    S,
    State,
    Tensor,
    V,
    divides,
    is_legal,
)


def random_plan(graph: Graph, mesh: Mesh, *, seed: int, fingerprint: str) -> Plan:
    """Draws a legal plan; the same seed gives the same plan."""
    draw = random.Random(seed)
    parameters = {
        name: _random_parameter(graph.tensors[tensor], mesh, draw)
        for name, tensor in graph.parameters.items()
    }
    inputs = {
        name: _random_layout(graph.tensors[tensor], mesh, draw, chunks=False)
        for name, tensor in graph.inputs.items()
    }
    ops = {op.name: _random_labels(graph, op, mesh, draw) for op in graph.ops}
    return Plan(mesh, fingerprint, f"random {seed}", 1, parameters, inputs, ops)


def _random_labels(graph: Graph, op: Op, mesh: Mesh, draw: random.Random) -> Labels:
    labels = [UNSPLIT] * len(mesh.axes)
    for axis in draw.sample(range(len(labels)), len(labels)):
        legal = []
        for choice in op.choices:
            labels[axis] = choice.label
            if is_legal(graph, op, tuple(labels), mesh):
                legal.append(choice.label)
        labels[axis] = draw.choice(legal)
    return tuple(labels)


def _random_layout(tensor: Tensor, mesh: Mesh, draw: random.Random, *, chunks: bool) -> Layout:
    layout: list[State] = [R] * len(mesh.axes)
    for axis in range(len(layout)):
        options = [R]
        for dim in range(len(tensor.dims)):
            options += [S(dim), S(dim, WHOLE)] if chunks else [S(dim)]
        legal = [
            s for s in options if _fits(tensor, (*layout[:axis], s, *layout[axis + 1 :]), mesh)
        ]
        layout[axis] = draw.choice(legal)
    return tuple(layout)


def _fits(tensor: Tensor, layout: Layout, mesh: Mesh) -> bool:
    exists = all(s.kind != "S" or tensor.dims[s.dim] for s in layout)
    return exists and divides(tensor.dims, layout, mesh)


def _random_parameter(tensor: Tensor, mesh: Mesh, draw: random.Random) -> ParameterPlan:
    storage = _random_layout(tensor, mesh, draw, chunks=True)
    resident = tuple(draw.choice([state, R, V]) for state in storage)
    return ParameterPlan(storage, resident, draw.choice(["step", "micro_batch"]))
