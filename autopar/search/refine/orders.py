"""The order of a mesh's axes as a choice of the search.

Where several axes split one factor, the earlier axis is the major one, and it leaves the factor by a detour ([Note:
nested splits] in `autopar.ir.conversion`). A user names axes as they are placed on the machine. The order in which
they should nest follows from what they split:

    S(0)@y S(0)@x -> S(0)@y           on the mesh y=2,x=4: x is the minor axis, and leaves by one collective
    S(0)@y S(0)@x -> S(0)@x           y is the major one: the parts of x must change places, too
    S(0)@x S(0)@y -> S(0)@x           on the mesh y=2,x=4 order x,y: one collective

So the plan that was found is priced in every other order of its axes, with the same choices and the same links. If a
step is shorter in one of them, the search is repeated for the mesh in the best of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from autopar.ir import (
    Graph,
    Labels,
    Layout,
    Mesh,
    ParameterPlan,
    Plan,
    is_legal,
    lies_in_chunks,
    nested_labels,
    nesting_of,
    plain,
)
from autopar.ir.note import Note
from autopar.ir.op import operand_layouts, result_layouts
from autopar.pipeline.composed import composed
from autopar.search.request.request import Request
from autopar.search.stages.given import Planned
from autopar.units import format_seconds

_WORTH = 1e-3  # least relative gain for which the search is repeated


def best_order(found: Planned, request: Request) -> Plan | None:
    """A plan's choices on its mesh in another order of the axes, if they make its step shorter.

    Tensors that blocks save in slices are left out of the comparison and of the result; which slices are possible
    depends on the order.
    """
    own = replace(found.plan, saved={})
    if own.mesh.occupied is not None or not shares_a_factor(found.graph, own):
        return None
    priced = {_seconds(found.graph, each, request): each for each in orders_of(found.graph, own)}
    best = min(priced, default=None)
    if best is None or best >= (1 - _WORTH) * _seconds(found.graph, own, request):
        return None
    return priced[best]


def orders_of(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """The plan in every other order of its axes in which it is legal."""
    names = plan.mesh.names
    used = [name for name, size in plan.mesh.axes if size > 1]
    idle = [name for name in names if name not in used]
    for order in itertools.permutations(used):
        if list(order) != used:
            turned = in_order(plan, plan.mesh.ordered([*order, *idle]))
            if _is_legal(graph, turned):
                yield turned


def in_order(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with the same states and choices along every axis, on its mesh in another order.

    Ops whose axes nest in an order of their own keep it, but where one of them is split by an exchange of rows (`t>e`).
    """
    positions = [plan.mesh.index(name) for name in mesh.names]

    def layout(states: Layout) -> Layout:
        return tuple(states[i] for i in positions)

    def labels(each: Labels) -> Labels:
        found = tuple(each[i] for i in positions)
        if each == tuple(map(plain, each)):
            return found
        return nested_labels(found, [positions.index(axis) for axis in nesting_of(each)])

    def parameter(how: ParameterPlan) -> ParameterPlan:
        return replace(how, storage=layout(how.storage), resident=layout(how.resident))

    return replace(
        plan,
        mesh=mesh,
        parameters={name: parameter(how) for name, how in plan.parameters.items()},
        inputs={name: layout(states) for name, states in plan.inputs.items()},
        ops={name: labels(each) for name, each in plan.ops.items()},
        saved={name: replace(line, split=layout(line.split)) for name, line in plan.saved.items()},
    )


def in_mesh_order(plan: Plan) -> Plan:
    """The plan with the axes of all ops in the order of its mesh."""
    ops = {name: nested_labels(each, range(len(each))) for name, each in plan.ops.items()}
    return replace(plan, ops=ops)


def shares_a_factor(graph: Graph, plan: Plan) -> bool:
    """Whether two axes split the same factor of some parameter, input or op, so that their order matters."""
    layouts = [each for how in plan.parameters.values() for each in (how.storage, how.resident)]
    return any(map(_has_pair, (*layouts, *plan.inputs.values()))) or any(
        _has_pair(layout)
        for op in graph.ops
        for layout in operand_layouts(op, plan.ops[op.name]) + result_layouts(op, plan.ops[op.name])
    )


def words_of_order(mesh: Mesh, before: Mesh, seconds: float, other_seconds: float) -> Note:
    """A note on why the axes of a plan have another order than the user named."""
    return Note(
        f"the ranks are placed as {mesh.placed}; where several axes split one dim, they nest in the order "
        f"{', '.join(mesh.names)}: a step takes {format_seconds(seconds)}, and in the order {', '.join(before.names)} "
        f"{format_seconds(other_seconds)}",
        "axes",
    )


def _seconds(graph: Graph, plan: Plan, request: Request) -> float:
    return composed(graph, plan, **request.figures).step_seconds


def _has_pair(layout: Layout) -> bool:
    split = [state[:3] for state in layout if state.kind == "S"]
    return len(set(split)) < len(split)


def _is_legal(graph: Graph, plan: Plan) -> bool:
    """Whether ops and parameters may lie so. The order decides which inner factors of a parameter may be split."""
    stored = all(
        lies_in_chunks(graph.tensors[graph.parameters[name]].dims, how.storage, plan.mesh)
        for name, how in plan.parameters.items()
        if name in graph.parameters
    )
    return stored and all(is_legal(graph, op, plan.ops[op.name], plan.mesh) for op in graph.ops)
