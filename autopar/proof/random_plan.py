"""Random legal plans: choices and owners of ops, layouts and owners of parameters, and tensors saved in slices.

The most important test of the project compares such plans with the model on a single device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from autopar.ir import (
    OWNED,
    PIPELINE_AXIS,
    SCHEDULES,
    UNSPLIT,
    WHOLE,
    Graph,
    Labels,
    Layout,
    Mesh,
    O,
    Op,
    ParameterPlan,
    Pipeline,
    Plan,
    R,
    S,
    State,
    Tensor,
    Tier,
    V,
    can_go_by_rows,
    is_legal,
    is_storable,
    lies_in_chunks,
    nested_labels,
    pipeline_position,
    uneven_axes,
    with_pipeline,
    without_pipeline,
)
from autopar.ir.saved import SavedLayout
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.saved_values import SavedValues
from autopar.pipeline.schedules import fewest_micro_batches
from autopar.search.refine.orders import in_mesh_order, in_order


def random_plan(graph: Graph, mesh: Mesh, *, seed: int, fingerprint: str, lone_ops: bool | None = None) -> Plan:
    """Draws a legal plan; the same seed gives the same plan.

    With an axis `pp` in the mesh, the schedule and the cuts (at any op) are random, too.

    Args:
        graph: the captured model.
        mesh: mesh of the ranks.
        seed: any number.
        fingerprint: fingerprint of the captured model.
        lone_ops: whether single ranks run a third of the ops alone. Such a plan has all tensors on the device and saves
            them as they are. None for a third of all plans.
    """
    if mesh.occupied is not None:
        plan = random_plan(graph, mesh.filled, seed=seed, fingerprint=fingerprint, lone_ops=True)
        plan = in_mesh_order(in_order(plan, mesh.filled))
        return _among_present(graph, plan, mesh, random.Random(f"vacant {seed}"))
    draw, whole = random.Random(seed), mesh
    mesh = _random_order(without_pipeline(mesh), random.Random(f"order {seed}"))
    if PIPELINE_AXIS in whole.names:
        whole = with_pipeline(mesh, dict(whole.axes)[PIPELINE_AXIS], pipeline_position(whole))
    tiers = random.Random(f"tiers {seed}")  # a generator by itself, so that the other choices of a seed do not change
    parameters = {
        name: _random_parameter(graph.tensors[tensor], mesh, draw, tiers.choice(("device", "host")))
        for name, tensor in graph.parameters.items()
    }
    owners = random.Random(f"owners {seed}")
    parameters = {
        name: _with_owners(graph.tensors[graph.parameters[name]], how, mesh, owners) for name, how in parameters.items()
    }
    inputs = {
        name: _random_layout(graph.tensors[tensor], mesh, draw, partial(graph.can_take, tensor), chunks=False)
        for name, tensor in graph.inputs.items()
    }
    ops = {op.name: _random_labels(graph, op, mesh, draw) for op in graph.ops}
    ops = _random_nesting(ops, random.Random(f"nesting {seed}"))
    # drawn apart, so that the size of a micro-batch, which other draws depend on, does not change it
    pipeline = _random_pipeline(graph, whole, random.Random(f"pipeline {seed}"))
    count = max(2, fewest_micro_batches(pipeline)) if pipeline else 1
    plan = Plan(
        mesh,
        fingerprint,
        f"random {seed}",
        count,
        parameters,
        inputs,
        ops,
        pipeline=pipeline,
        precision=graph.precision,
        loss_tile_bytes=graph.loss_tile_bytes,
    )
    alone = random.Random(f"alone {seed} {mesh}")
    drawn = alone.random() < 1 / 3
    if drawn if lone_ops is None else lone_ops:  # what follows does not go with ops on one rank yet
        plan = _with_lone_ops(graph, plan, alone)
        return _random_rows(graph, plan, random.Random(f"rows {seed}"))
    plan = _random_residents(plan, random.Random(f"residents {seed}"))
    plan = _random_rows(graph, plan, random.Random(f"rows {seed}"))
    return _random_slices(graph, plan, random.Random(f"saved {seed}"))


def _random_order(mesh: Mesh, draw: random.Random) -> Mesh:
    """The mesh, in half of all plans with another order of its axes."""
    if draw.random() < 0.5:
        return mesh
    return mesh.ordered(draw.sample(mesh.names, len(mesh.names)))


def _with_lone_ops(graph: Graph, plan: Plan, draw: random.Random) -> Plan:
    """The plan with about a third of its choices in favour of one rank, and half of its owned parameters used there.

    Parameters lie on the device. An op that one rank cannot run alone keeps its choices.
    """
    ops = {}
    for op in graph.ops:
        labels = tuple(
            f"{OWNED}{draw.randrange(size)}" if draw.random() < 1 / 3 else label
            for label, size in zip(plan.ops[op.name], plan.mesh.sizes, strict=True)
        )
        ops[op.name] = labels if is_legal(graph, op, labels, plan.mesh) else plan.ops[op.name]
    parameters = {
        name: replace(how, tier="device", resident=_used_by_owners(how, draw)) for name, how in plan.parameters.items()
    }
    others = random.Random(f"others {plan.recipe} {plan.mesh}")
    parameters = {
        name: replace(how, resident=_used_by_others(graph.tensors[graph.parameters[name]], how, plan.mesh, others))
        for name, how in parameters.items()
    }
    return replace(plan, ops=ops, parameters=parameters)


def _among_present(graph: Graph, plan: Plan, mesh: Mesh, draw: random.Random) -> Plan:
    """A plan with ops on single ranks, as one that needs nobody at the vacant places of a mesh.

    Three quarters of the ops run on the first row of the first axis, split as they were; others run on any one rank or
    unsplit on all. One rank stores a parameter, or all do, and inputs are whole.
    """
    assert math.prod(mesh.sizes[1:]) <= mesh.ranks, f"{mesh} has no whole row"
    whole: Layout = (R,) * len(mesh.axes)

    def owners() -> tuple[int, ...]:
        return mesh.coordinates(draw.randrange(mesh.ranks))

    def labels(op: Op) -> Labels:
        every = draw.random()
        if every < 3 / 4:
            found = (f"{OWNED}0", *plan.ops[op.name][1:])
        elif every < 7 / 8:
            found = tuple(f"{OWNED}{owner}" for owner in owners())
        else:
            found = (UNSPLIT,) * len(mesh.axes)
        return found if is_legal(graph, op, found, mesh) else (UNSPLIT,) * len(mesh.axes)

    def stored(tensor: Tensor, how: ParameterPlan) -> ParameterPlan:
        on_one = bool(tensor.dims) and draw.random() < 3 / 4
        storage = tuple(map(O, owners())) if on_one else whole
        resident = (O(0), *how.resident[1:]) if tensor.dims and draw.random() < 1 / 2 else whole
        resident = whole if uneven_axes(tensor.dims, resident, mesh) else resident
        can = can_go_by_rows(tensor.dims, storage, resident, mesh)
        return replace(how, storage=storage, resident=resident, by_rows=can and how.by_rows)

    return replace(
        plan,
        mesh=mesh,
        inputs=dict.fromkeys(plan.inputs, whole),
        ops={op.name: labels(op) for op in graph.ops},
        parameters={name: stored(graph.tensors[graph.parameters[name]], how) for name, how in plan.parameters.items()},
    )


def _used_by_owners(how: ParameterPlan, draw: random.Random) -> Layout:
    """The resident layout of a parameter, in which half of its owners alone use it."""
    return tuple(
        at_rest if at_rest.kind == "O" and draw.random() < 1 / 2 else used
        for at_rest, used in zip(how.storage, how.resident, strict=True)
    )


def _used_by_others(tensor: Tensor, how: ParameterPlan, mesh: Mesh, draw: random.Random) -> Layout:
    """The resident layout of a parameter, wherever it is stored; along an axis one rank uses it one time in eight."""
    owners = [draw.randrange(size) if draw.random() < 1 / 8 else None for size in mesh.sizes]
    if not tensor.dims or uneven_axes(tensor.dims, how.storage, mesh):
        return how.resident
    return tuple(used if owner is None else O(owner) for used, owner in zip(how.resident, owners, strict=True))


def _random_rows(graph: Graph, plan: Plan, draw: random.Random) -> Plan:
    """The plan in which half of the gradients that are sent to one owner are sent by rows."""
    parameters = {}
    for name, how in plan.parameters.items():
        dims = graph.tensors[graph.parameters[name]].dims
        can = can_go_by_rows(dims, how.storage, how.resident, plan.mesh)
        parameters[name] = replace(how, by_rows=can and draw.random() < 1 / 2)
    return replace(plan, parameters=parameters)


def _random_residents(plan: Plan, draw: random.Random) -> Plan:
    """The plan with random resident tiers: in half of all plans, half of the host's parameters stay there."""
    if draw.random() < 0.5:
        return plan
    parameters = {
        name: replace(how, resident_tier=draw.choice(("device", how.tier))) for name, how in plan.parameters.items()
    }
    return replace(plan, parameters=parameters)


def _random_slices(graph: Graph, plan: Plan, draw: random.Random) -> Plan:
    """The plan with random slices: half of all plans save some tensors in slices or on the host; half of these
    recompute blocks.
    """
    if draw.random() < 0.5 or not has_blocks(graph):
        return plan
    plan = replace(plan, recompute=draw.choice(["none", "full"]))
    values = SavedValues(graph, plan)
    whole = SavedLayout((R,) * len(plan.mesh.axes))
    lines = {each.name: values.sliced(each, lambda _, states: draw.choice(states)) or whole for each in values.all}
    tiers: tuple[Tier, ...] = ("device", "host")
    lines = {name: replace(line, tier=draw.choice(tiers)) for name, line in lines.items()}
    return replace(plan, saved={name: line for name, line in lines.items() if line != whole})


def _random_pipeline(graph: Graph, mesh: Mesh, draw: random.Random) -> Pipeline | None:
    if PIPELINE_AXIS not in mesh.names:
        return None
    ranks = dict(mesh.axes)[PIPELINE_AXIS]
    shapes = {"one": ranks, "rounds": 2 * ranks, "v": 2 * ranks}
    schedule = draw.choice([s for s in SCHEDULES if shapes[SCHEDULES[s]] <= len(graph.ops)])
    places = sorted(draw.sample(range(1, len(graph.ops)), shapes[SCHEDULES[schedule]] - 1))
    return Pipeline(ranks, schedule, tuple(graph.ops[i].name for i in places), pipeline_position(mesh))


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


def _random_nesting(ops: Mapping[str, Labels], draw: random.Random) -> dict[str, Labels]:
    """The same choices, in half of all plans with axes that nest in an order by itself for every op."""
    if draw.random() < 0.5:
        return dict(ops)
    return {name: nested_labels(labels, draw.sample(range(len(labels)), len(labels))) for name, labels in ops.items()}


def _random_layout(
    tensor: Tensor, mesh: Mesh, draw: random.Random, fits: Callable[[Layout, Mesh], bool], *, chunks: bool
) -> Layout:
    layout: list[State] = [R] * len(mesh.axes)
    for axis in range(len(layout)):
        options = [R]
        for dim in range(len(tensor.dims)):
            inner = [S(dim, factor) for factor in range(1, len(tensor.dims[dim]))]
            options += [S(dim), S(dim, WHOLE), *inner] if chunks else [S(dim)]
        legal = [s for s in options if _fits(tensor, (*layout[:axis], s, *layout[axis + 1 :]), mesh, fits)]
        layout[axis] = draw.choice(legal)
    return tuple(layout)


def _fits(tensor: Tensor, layout: Layout, mesh: Mesh, fits: Callable[[Layout, Mesh], bool]) -> bool:
    exists = all(s.kind != "S" or tensor.dims[s.dim] for s in layout)
    return exists and fits(layout, mesh) and lies_in_chunks(tensor.dims, layout, mesh)


def _with_owners(tensor: Tensor, how: ParameterPlan, mesh: Mesh, draw: random.Random) -> ParameterPlan:
    """The parameter with an owner along each axis with a probability of 1/4."""
    owners = [draw.randrange(size) if draw.random() < 0.25 else None for size in mesh.sizes]
    if not tensor.dims or owners == [None] * len(owners):
        return how
    if uneven_axes(tensor.dims, how.storage, mesh):  # such parts have no owner
        return how
    storage = tuple(s if owner is None else O(owner) for s, owner in zip(how.storage, owners, strict=True))
    return replace(how, storage=storage) if lies_in_chunks(tensor.dims, storage, mesh) else how


def _random_parameter(tensor: Tensor, mesh: Mesh, draw: random.Random, tier: Tier) -> ParameterPlan:
    storage = _random_layout(tensor, mesh, draw, partial(is_storable, tensor.dims), chunks=True)
    resident = tuple(draw.choice([state, R, V]) for state in storage)
    return ParameterPlan(storage, resident, draw.choice(["step", "micro_batch"]), tier)
