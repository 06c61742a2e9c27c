"""Checks that a plan belongs to the captured model, before a rank's program is built from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

from autopar.analysis.factors import Analysis
from autopar.capture.captured import Captured
from autopar.capture.remedies import remedy_of_other_graph
from autopar.errors import PlanError
from autopar.ir import (
    Dims,
    Graph,
    Layout,
    Mesh,
    Op,
    ParameterPlan,
    Plan,
    R,
    State,
    V,
    can_go_by_rows,
    format_layout,
    go_together,
    has_owner,
    is_least_deep,
    is_legal,
    is_storable,
    lies_in_chunks,
    nested,
    nested_labels,
    nesting_of,
    owner_of,
    plain,
    runs_alone,
    uneven_axes,
    why_not_alone,
)
from autopar.ir.features import Feature, check_features
from autopar.ir.layout import WHOLE
from autopar.ir.parameter_plan import Reduction
from autopar.ir.recompute import Selection
from autopar.pipeline.saved_values import SavedValues
from autopar.program.recomputation import check_selection
from autopar.program.vacant_places import check_vacant_places


def check_plan(captured: Captured, analysis: Analysis, plan: Plan) -> None:
    """Raises PlanError, with the reason, unless a plan fits this captured model."""
    if plan.precision != captured.precision:
        raise PlanError(
            f"The plan was made for the precision {plan.precision or 'of the parameters'}, but the model was "
            f"captured under {captured.precision or 'none'}; give the same precision=..., or make another plan."
        )
    if plan.loss_tile_bytes != captured.loss_tile_bytes:
        raise PlanError(
            f"The plan computes the loss in tiles of {plan.loss_tile_bytes} bytes, but the model was captured with "
            f"{captured.loss_tile_bytes}: make a plan for this capture."
        )
    if plan.fingerprint != captured.fingerprint:
        raise PlanError(
            f"The plan was made for a model with fingerprint {plan.fingerprint}, but this one has "
            f"{captured.fingerprint}: {_difference(captured, analysis.graph, plan)}. "
            "Make a plan for this model."
        )
    graph = analysis.graph
    _check_names("parameter", plan.parameters, graph.parameters)
    _check_names("input", plan.inputs, graph.inputs)
    _check_names("op", plan.ops, graph.by_name)
    for name, parameter in plan.parameters.items():
        _check_parameter(name, parameter, graph.tensors[graph.parameters[name]].dims, plan.mesh)
    for name, layout in plan.inputs.items():
        tensor = graph.tensors[graph.inputs[name]]
        takes = partial(graph.can_take, tensor.name)
        _check_layout(f"input {name}", layout, tensor.dims, plan.mesh, "RSV", takes)
    for op in graph.ops:
        _check_op(op, analysis, plan)
    if plan.pipeline is not None:
        _check_cuts(plan.pipeline.cuts, analysis)
        if plan.pipeline.update_every:
            _check_versions(plan, plan.pipeline.schedule)
    if isinstance(plan.recompute, Selection):
        check_selection(plan, plan.recompute, graph)
    if plan.overlap_batches > 1:
        _check_overlap(plan, captured.mutated.values())
    if plan.saved:
        SavedValues(graph, plan).check()
    _refuse_with_lone_ops(plan)
    check_vacant_places(graph, plan)


def _check_names(what: str, found: Iterable[str], known: Iterable[str]) -> None:
    ours, theirs = dict.fromkeys(known), dict.fromkeys(found)
    missing = [name for name in ours if name not in theirs]
    if missing:
        raise PlanError(
            f"The plan is damaged: it has no {what} {missing[0]}, but needs one entry for each of the {len(ours)} "
            f"{what}s of the model."
        )
    unknown = [name for name in theirs if name not in ours]
    if unknown:
        some = ", ".join(list(ours)[:3]) or "none"
        raise PlanError(
            f"The plan is damaged: the model has no {what} {unknown[0]}; its {len(ours)} {what}s "
            f"are {some}{', ...' if len(ours) > 3 else ''}."
        )


def _check_parameter(name: str, parameter: ParameterPlan, dims: Dims, mesh: Mesh) -> None:
    _check_layout(f"storage of parameter {name}", parameter.storage, dims, mesh, "RSO")
    _check_owners(name, parameter, dims, mesh)
    if not lies_in_chunks(tuple(sizes or (1,) for sizes in dims), parameter.storage, mesh):
        raise PlanError(
            f"The storage of parameter {name} is {format_layout(parameter.storage, mesh)}, which gives a rank several "
            f"pieces of a dim of factors {dims}. Between steps a rank must have one contiguous part of each dim: split "
            "its first factor, or a later one if earlier axes split all factors before it completely."
        )
    _check_layout(f"resident layout of parameter {name}", parameter.resident, dims, mesh, "RSVO")
    _check_uneven(name, parameter, dims, mesh)
    _check_rows(name, parameter, dims, mesh)
    if parameter.reduce not in get_args(Reduction):
        raise PlanError(
            f"The plan is damaged: the gradient of parameter {name} is reduced per {parameter.reduce!r}, but it must "
            f"be per {' or '.join(get_args(Reduction))}."
        )


def _check_uneven(name: str, parameter: ParameterPlan, dims: Dims, mesh: Mesh) -> None:
    """Raises PlanError for the use of a parameter in parts of different sizes, or by one rank, that cannot be run."""
    stored, used = parameter.storage, parameter.resident
    cut = uneven_axes(dims, stored, mesh)
    entered = [axis for axis in uneven_axes(dims, used, mesh) if used[axis] != stored[axis]]
    if entered or (cut and has_owner(used)):
        axis = (*entered, *cut)[0]
        where = f"{format_layout(used, mesh)} and its storage {format_layout(stored, mesh)}"
        raise PlanError(
            f"The resident layout of parameter {name} is {where}, but {mesh.names[axis]} does not divide its dims, of "
            f"factors {dims}. Parts of different sizes are stored, gathered whole (V or R in the resident layout), or "
            f"kept as they are: write the same state along {mesh.names[axis]} in both, or V in the resident layout."
        )


def _check_rows(name: str, how: ParameterPlan, dims: Dims, mesh: Mesh) -> None:
    """Raises PlanError for a gradient that is to be sent by rows, and is sent to no owner."""
    if how.by_rows and not can_go_by_rows(dims, how.storage, how.resident, mesh):
        stored, used = (format_layout(layout, mesh) for layout in (how.storage, how.resident))
        raise PlanError(
            f"The plan sends the gradient of parameter {name} by rows, but the conversion from {used} to {stored} does "
            "not end on a single owner; leave out 'by rows', or store it on one rank, such as O(0)."
        )


def _check_overlap(plan: Plan, mutated: Iterable[str]) -> None:
    """Raises PlanError for a model whose micro-batches cannot take turns, because each updates a buffer."""
    for name in mutated:
        raise PlanError(
            f"The plan runs {plan.overlap_batches} micro-batches at a time, but the model updates its buffer {name} in "
            "each of them, one after another. Leave out overlap_batches."
        )


def _refuse_with_lone_ops(plan: Plan) -> None:
    """Raises PlanError for a plan in which one rank runs an op alone, with a feature that does not support it yet."""
    found = [name for name, labels in plan.ops.items() if runs_alone(labels)]
    if found:
        op = f"{found[0]} ({' '.join(plan.ops[found[0]])})"
        words = f"{len(found)} of {len(plan.ops)} ops on one rank of an axis, such as {op},"
        check_features("The plan has", plan.features | {Feature.LONE_OPS: words}, PlanError)


def _check_owners(name: str, parameter: ParameterPlan, dims: Dims, mesh: Mesh) -> None:
    """Raises PlanError for a storage on one rank of an axis that cannot be run."""
    found = [layout for layout in (parameter.storage, parameter.resident) if has_owner(layout)]
    if not found:
        return
    for layout in found:
        for state, (axis, size) in zip(layout, mesh.axes, strict=True):
            if state.kind == "O" and not 0 <= state.owner < size:
                raise PlanError(
                    f"The plan gives parameter {name} to {state}@{axis}, but the axis {axis} has {size} ranks, counted "
                    f"from 0; write O(0) to O({size - 1})."
                )
    verb = "stores" if found[0] == parameter.storage else "uses"
    where = f"The plan {verb} parameter {name} on one rank ({format_layout(found[0], mesh)})"
    if not dims:
        raise PlanError(f"{where}, but it is a single number, of shape []; store it in R.")


def _check_layout(
    where: str, layout: Layout, dims: Dims, mesh: Mesh, kinds: str, fits: Callable[[Layout, Mesh], bool] | None = None
) -> None:
    if len(layout) != len(mesh.axes):
        raise PlanError(
            f"The plan is damaged: the {where} has {len(layout)} states for the {len(mesh.axes)} axes of {mesh}."
        )
    dims = tuple(sizes or (1,) for sizes in dims)  # a dim of size 1 may have no factors
    for state, axis in zip(layout, mesh.names, strict=True):
        wrong = _wrong_state(state, dims, kinds)
        if wrong:
            raise PlanError(f"The plan is damaged: the {where} is {state}@{axis}, and {wrong}.")
    if any(state.depth for state in layout):
        raise PlanError(
            f"The {where} is {format_layout(layout, mesh)}, and axes that split one dim of it nest in the order of the "
            f"mesh, {', '.join(mesh.names)}, as in DTensor. Write "
            f"{format_layout(nested(layout, range(len(layout))), mesh)}; ops may use it in another order."
        )
    if not (fits(layout, mesh) if fits else is_storable(dims, layout, mesh)):
        raise PlanError(
            f"The plan is damaged: the {where} is {format_layout(layout, mesh)}, but the mesh {mesh} does not divide "
            f"its dims, of factors {dims}."
        )


def _wrong_state(state: State, dims: Dims, kinds: str) -> str:
    """The reason why a tensor with these dims cannot be in a state, "" if it can."""
    if state.kind not in kinds:
        return f"it can be {', '.join(kinds[:-1])} or {kinds[-1]}"
    if state.kind != "S":
        return ""
    if not 0 <= state.dim < len(dims):
        return f"its dims are 0 to {len(dims) - 1}" if dims else "it has no dims"
    factors = dims[state.dim]
    if state.factor != WHOLE and not 0 <= state.factor < len(factors):
        return f"dim {state.dim} has the factors 0 to {len(factors) - 1}, of sizes {factors}"
    return ""


def _check_op(op: Op, analysis: Analysis, plan: Plan) -> None:
    labels, mesh = plan.ops[op.name], plan.mesh
    if len(labels) != len(mesh.axes):
        raise PlanError(
            f"The plan is damaged: op {op.name} has {len(labels)} labels for the {len(mesh.axes)} axes of {mesh}."
        )
    known = [choice.label for choice in op.choices]
    for label, axis in zip(labels, mesh.names, strict=True):
        if plain(label) not in known and owner_of(label) is None:
            raise PlanError(
                f"The plan is damaged: op {op.name} ({op.kind}) has the label {label!r} on {axis}, "
                f"but its choices are {', '.join(known)}."
            )
    if not go_together(labels):
        raise PlanError(
            f"The plan is damaged: op {op.name} ({op.kind}) has the labels {' '.join(labels)}. Rows are exchanged "
            "along all axes that split the experts (t>e), or along none (e)."
        )
    if not is_least_deep(labels):
        least = nested_labels(labels, nesting_of(labels))
        raise PlanError(
            f"The plan is damaged: op {op.name} ({op.kind}) has the labels {' '.join(labels)}, but this nesting of "
            f"axes is written {' '.join(least)}."
        )
    if runs_alone(labels) and (reason := why_not_alone(op, labels, mesh)):
        raise PlanError(f"The plan runs op {op.name} ({op.kind}) on one rank ({' '.join(labels)}), but {reason}.")
    if not is_legal(analysis.graph, op, labels, mesh):
        sizes = ", ".join(f"{c.label} of size {c.size}" for c in op.choices if c.splits)
        raise PlanError(
            f"The plan is damaged: op {op.name} ({op.kind}) has the labels {' '.join(labels)}, "
            f"but the mesh {mesh} does not divide the factors that they split; it can split {sizes}."
        )


def _check_versions(plan: Plan, schedule: str) -> None:
    """Raises PlanError if parameters are not used as they are stored, which schedules with versions do not support."""
    for name, how in plan.parameters.items():
        used = tuple(R if state == V else state for state in how.resident)
        if used != how.storage or how.tier != "device":
            raise PlanError(
                f"Parameter {name} is stored {how.stored_text(plan.mesh)} and used as "
                f"{format_layout(how.resident, plan.mesh)}, but the schedule {schedule} keeps several versions of "
                "parameters, which so far must be stored in the layout in which they are used. Take a recipe such as "
                "ddp or tp, or 1f1b."
            )


def _check_cuts(cuts: tuple[str, ...], analysis: Analysis) -> None:
    position = {op.name: i for i, op in enumerate(analysis.graph.ops)}
    unknown = [name for name in cuts if name not in position]
    if unknown:
        raise PlanError(f"The plan is damaged: a stage begins with {unknown[0]}, which is not an op.")
    places = [position[name] for name in cuts]
    if any(a >= b for a, b in itertools.pairwise(places)):
        raise PlanError(
            f"The plan is damaged: its stages begin with {', '.join(cuts)}, which is not the order of "
            "these ops in the model."
        )


def _difference(captured: Captured, graph: Graph, plan: Plan) -> str:
    """Words for the first difference between a graph and the graph for which a plan was made."""
    found = _name_difference(graph, plan) or _shape_difference(graph, plan) or _dtype_difference(captured, plan)
    if found:
        return found
    remedy = remedy_of_other_graph(captured.guards)
    return _op_difference(graph, plan) + (f" ({remedy})" if remedy else "")


def _name_difference(graph: Graph, plan: Plan) -> str:
    for what, ours, theirs in (
        ("parameter", set(graph.parameters), set(plan.parameters)),
        ("input", set(graph.inputs), set(plan.inputs)),
    ):
        for names, has in ((theirs - ours, "has no"), (ours - theirs, "also has")):
            if names:
                return f"it {has} {what} {min(names)}"
    return ""


def _shape_difference(graph: Graph, plan: Plan) -> str:
    for name, shape in graph.edge_shapes.items():
        planned = plan.shapes.get(name, shape)
        if planned != shape:
            is_part = name.startswith("input ") and plan.micro_batches > 1
            part = f" in each of {plan.micro_batches} micro-batches" if is_part else ""
            return f"its {name} has the shape {list(shape)}, but the plan takes {list(planned)}{part}"
    return ""


def _dtype_difference(captured: Captured, plan: Plan) -> str:
    for name, dtype in captured.edge_dtypes.items():
        planned = plan.dtypes.get(name, dtype)
        if planned != dtype:
            return f"its {name} has the dtype {dtype}, but the plan takes {planned}"
    return ""


def _op_difference(graph: Graph, plan: Plan) -> str:
    for ours, theirs in itertools.zip_longest((op.name for op in graph.ops), plan.ops):
        if ours != theirs:
            return f"where the plan has {theirs or 'no further op'}, it runs {ours or 'nothing more'}"
    return "an op has different arguments, or a tensor a different dtype"
