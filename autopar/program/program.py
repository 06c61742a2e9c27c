"""A program: the captured model rewritten for one rank, with what is needed to feed and read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, fx

from autopar._torch import pytree
from autopar.analysis.extras import Extra, extras_of, refuse_split_extras
from autopar.analysis.factors import Analysis, output_nodes
from autopar.analysis.objective import BatchCapture, Objective, objective_of
from autopar.capture.captured import Captured
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
    Tier,
    V,
    divides,
    format_layout,
    go_together,
    has_owner,
    is_legal,
    lies_in_chunks,
)
from autopar.ir.layout import WHOLE
from autopar.ir.plan import Reduction
from autopar.ir.recompute import Selection
from autopar.ops.nodes import draws
from autopar.passes import partition, verify_graph
from autopar.pipeline.saved_values import SavedValues
from autopar.program.recomputation import check_selection, mark_blocks
from autopar.program.slices import SavedSlice, note_slices

_MEAN = Objective()


@dataclass(frozen=True)
class TensorSpec:
    """An argument or result of a program: a parameter, buffer, input or output.

    Attributes:
        name: qualified name of a parameter or buffer, or name of an input or output.
        dims: for every dim of the whole tensor the sizes of its factors.
        shape: shape of the whole tensor.
        dtype: dtype in which the program takes or returns the tensor.
        layout: layout of the local part that the program takes or returns.
        tier: memory in which the program takes a parameter.
        reduced: dtype in which a parameter's gradient is accumulated; None for `dtype`.
    """

    name: str
    dims: Dims
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    reduced: torch.dtype | None = None
    tier: Tier = "device"

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.reduced or self.dtype


@dataclass(frozen=True)
class Wire:
    """A local tensor on its way from one pipeline stage to the next.

    Attributes:
        name: name of the node that computes it.
        shape: on every rank of a stage.
        needs_grad: whether a gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class Program:
    """What one rank runs: `module(*parameters, *buffers, *constants, *inputs, *received)`, all local.

    It returns new values of buffers, outputs, and what is sent. The program of a pipeline stage is one
    like any other (`autopar.program.stages`); that of a whole model receives and sends nothing.

    Attributes:
        module: the local graph; collectives name mesh axes until they are bound to process groups.
        plan: what it carries out.
        parameters: parameters in argument order; their layout is the resident one.
        buffers: buffers in argument order, replicated.
        constants: tensors that the model's code holds.
        inputs: tensor inputs, in pytree order.
        in_spec: pytree of (args, kwargs).
        literals: leaf position -> the value built into the graph, for inputs that are no tensor.
        outputs: local outputs after the new values of mutated buffers, tensors only.
        out_spec: pytree of the model's result.
        out_literals: leaf position of the result -> value, for leaves that are no tensor.
        mutated: output position -> name of the buffer it updates; these come first.
        tied: further names of tied parameters -> their first name.
        frozen: parameters that take no gradient.
        is_step: whether the last output is the loss; those before it are the step's extra results.
        has_more: whether the model returned the loss of a step among other things, as those of transformers do.
        received: tensors that the previous stage sends.
        sent: tensors that the stage sends to the next one.
        recomputed: numbers of the blocks that backward recomputes; every call of the module has the number
            of its block in `meta["block"]`.
        slices: name of a tensor that is saved in slices -> its slice.
        objective: how the loss of a batch comes from the losses of its micro-batches.
        extras: how each extra result of a step comes from those of its micro-batches.
    """

    module: fx.GraphModule
    plan: Plan
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[TensorSpec, ...]
    in_spec: pytree.TreeSpec
    literals: Mapping[int, Any]
    outputs: tuple[TensorSpec, ...]
    out_spec: pytree.TreeSpec
    out_literals: Mapping[int, Any]
    mutated: Mapping[int, str]
    tied: Mapping[str, str]
    frozen: frozenset[str]
    is_step: bool
    has_more: bool = False
    received: tuple[Wire, ...] = ()
    sent: tuple[Wire, ...] = ()
    recomputed: frozenset[int] = frozenset()
    objective: Objective = _MEAN
    extras: tuple[Extra, ...] = ()
    slices: Mapping[str, SavedSlice] = field(default_factory=dict)

    @cached_property
    def is_random(self) -> bool:
        """Whether some op of the program draws random numbers."""
        return any(draws(node) for node in self.module.graph.nodes)

    def storage(self, name: str) -> ParameterPlan:
        """The plan of a parameter."""
        return self.plan.parameters[name]


def build_program(
    captured: Captured, analysis: Analysis, plan: Plan, batch: BatchCapture | None = None
) -> Program:
    """Rewrites a captured model into the program of one rank, as a plan says.

    Args:
        captured: the captured model, at the size of a micro-batch.
        analysis: the analysis of the capture.
        plan: the plan for this model.
        batch: the same step captured for the whole batch, whose comparison shows which numbers count rows; None for a
            plan of one micro-batch. Without it, no number is taken to count rows.

    Raises PlanError if the plan is for another model, or not legal. Raises StepError for an extra result of
    the step that cannot be computed from micro-batches.
    """
    check_plan(captured, analysis, plan)
    module, layouts = partition(captured, analysis, plan)
    verify_graph(module, after="partition")
    placeholders = {
        n.name: n.meta.get("val") for n in captured.module.graph.find_nodes(op="placeholder")
    }

    def spec(node: str, name: str, layout: Layout) -> TensorSpec:
        value, tensor = placeholders[node], analysis.graph.tensors[node]
        return TensorSpec(name, tensor.dims, tuple(value.shape), value.dtype, layout)

    def parameter(node: str, name: str) -> TensorSpec:
        found, how = spec(node, name, plan.parameters[name].resident), plan.parameters[name]
        reduced = captured.gradient_dtype(name, found.dtype)
        return replace(found, reduced=reduced, tier=how.resident_tier)

    batch = batch or BatchCapture(captured, analysis.graph)
    extras = extras_of(captured, analysis.graph, batch)
    refuse_split_extras(extras, plan.micro_batches)
    replicated = (R,) * len(plan.mesh.axes)
    parameters = captured.parameters.items()
    outputs = _outputs(captured, analysis, layouts)
    recomputed = mark_blocks(module, analysis.graph, plan)
    return Program(
        module=module,
        plan=plan,
        parameters=tuple(parameter(k, v) for k, v in parameters),
        buffers=tuple(spec(k, v, replicated) for k, v in captured.buffers.items()),
        constants=tuple(captured.constants.values()),
        inputs=tuple(spec(k, v, plan.inputs[v]) for k, v in captured.inputs.items()),
        in_spec=captured.in_spec,
        literals=captured.literals,
        outputs=outputs,
        out_spec=batch.captured.out_spec,
        out_literals=_out_literals(batch.captured),
        mutated=captured.mutated,
        tied=captured.tied,
        frozen=captured.frozen,
        is_step=captured.is_step,
        has_more=captured.has_more,
        recomputed=recomputed,
        slices=note_slices(module, analysis.graph, plan),
        objective=objective_of(captured, batch) if plan.micro_batches > 1 else _MEAN,
        extras=extras,
    )


def _outputs(
    captured: Captured, analysis: Analysis, layouts: tuple[Layout, ...]
) -> tuple[TensorSpec, ...]:
    """The tensor outputs that follow the new values of buffers."""
    specs = []
    for node, layout in zip(output_nodes(captured.module), layouts, strict=True):
        tensor, value = analysis.graph.tensors[analysis.names[node.name][0]], node.meta["val"]
        specs.append(TensorSpec(node.name, tensor.dims, tuple(value.shape), value.dtype, layout))
    return tuple(specs[len(captured.mutated) :])


def _out_literals(captured: Captured) -> dict[int, Any]:
    """Position of a leaf of the result that is not a tensor -> its value."""
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    own = list(output)[len(captured.mutated) :]
    return {i: leaf for i, leaf in enumerate(own) if not isinstance(leaf, fx.Node)}


def check_plan(captured: Captured, analysis: Analysis, plan: Plan) -> None:
    """Raises PlanError, with the reason, unless a plan fits this captured model."""
    if plan.precision != captured.precision:
        raise PlanError(
            f"The plan was made for the precision {plan.precision or 'of the parameters'}, and the model was "
            f"captured under {captured.precision or 'none'}; give the same precision=..., or make another plan."
        )
    if plan.fingerprint != captured.fingerprint:
        raise PlanError(
            f"The plan was made for a model with fingerprint {plan.fingerprint}, and this one has "
            f"{captured.fingerprint}: {_difference(analysis.graph, plan)}. Make a plan for this model."
        )
    graph = analysis.graph
    _check_names("parameter", plan.parameters, graph.parameters)
    _check_names("input", plan.inputs, graph.inputs)
    _check_names("op", plan.ops, graph.by_name)
    for name, parameter in plan.parameters.items():
        _check_parameter(name, parameter, graph.tensors[graph.parameters[name]].dims, plan.mesh)
    for name, layout in plan.inputs.items():
        dims = graph.tensors[graph.inputs[name]].dims
        _check_layout(f"input {name}", layout, dims, plan.mesh, "RSV")
    for op in graph.ops:
        _check_op(op, analysis, plan)
    if plan.meeting is not None:
        _refuse_owners(plan, "replicas that meet")
    if plan.pipeline is not None:
        _refuse_owners(plan, f"{plan.pipeline.stages} pipeline stages")
        _check_cuts(plan.pipeline.cuts, analysis)
        if plan.pipeline.update_every:
            _check_versions(plan, plan.pipeline.schedule)
    if isinstance(plan.recompute, Selection):
        check_selection(plan, plan.recompute, graph)
    if plan.saved:
        SavedValues(graph, plan).check()


def _check_names(what: str, found: Iterable[str], known: Iterable[str]) -> None:
    ours, theirs = dict.fromkeys(known), dict.fromkeys(found)
    missing = [name for name in ours if name not in theirs]
    if missing:
        raise PlanError(
            f"The plan is damaged: it has no {what} {missing[0]}, and takes one entry for each of "
            f"the {len(ours)} {what}s of the model."
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
            f"pieces of a dim, of factors {dims}. At rest a rank has one run of each dim: split its first factor, or "
            "the next one where earlier axes split those before it to the end."
        )
    _check_layout(f"resident layout of parameter {name}", parameter.resident, dims, mesh, "RSV")
    if parameter.reduce not in get_args(Reduction):
        raise PlanError(
            f"The plan is damaged: the gradient of parameter {name} is reduced per "
            f"{parameter.reduce!r}, and it can be per {' or '.join(get_args(Reduction))}."
        )


def _refuse_owners(plan: Plan, what: str) -> None:
    """Raises PlanError for a plan with pipeline stages or replicas in which one rank owns a parameter."""
    owned = [name for name, how in plan.parameters.items() if has_owner(how.storage)]
    if owned:
        raise PlanError(
            f"The plan stores {len(owned)} of {len(plan.parameters)} parameters on one rank of an axis, such as "
            f"{owned[0]}, and has {what}; with those parameters are stored in R or S so far."
        )


def _check_owners(name: str, parameter: ParameterPlan, dims: Dims, mesh: Mesh) -> None:
    """Raises PlanError for a storage on one rank of an axis that cannot be run."""
    if not has_owner(parameter.storage):
        return
    for state, (axis, size) in zip(parameter.storage, mesh.axes, strict=True):
        if state.kind == "O" and not 0 <= state.owner < size:
            raise PlanError(
                f"The plan gives parameter {name} to {state}@{axis}, and the axis {axis} has {size} ranks, counted "
                f"from 0; write O(0) to O({size - 1})."
            )
    where = (
        f"The plan stores parameter {name} on one rank ({format_layout(parameter.storage, mesh)})"
    )
    if not dims:
        raise PlanError(f"{where}, and it is a single number, of shape []; store it in R.")
    if parameter.tier != "device":
        raise PlanError(f"{where} and in the tier {parameter.tier}; one of both can be had so far.")


def _check_layout(where: str, layout: Layout, dims: Dims, mesh: Mesh, kinds: str) -> None:
    if len(layout) != len(mesh.axes):
        raise PlanError(
            f"The plan is damaged: the {where} has {len(layout)} states for the {len(mesh.axes)} "
            f"axes of {mesh}."
        )
    dims = tuple(sizes or (1,) for sizes in dims)  # a dim of size 1 may have no factors
    for state, axis in zip(layout, mesh.names, strict=True):
        wrong = _wrong_state(state, dims, kinds)
        if wrong:
            raise PlanError(f"The plan is damaged: the {where} is {state}@{axis}, and {wrong}.")
    if not divides(dims, layout, mesh):
        raise PlanError(
            f"The plan is damaged: the {where} is {format_layout(layout, mesh)}, which does not "
            f"divide its dims, of factors {dims}, on the mesh {mesh}."
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
            f"The plan is damaged: op {op.name} has {len(labels)} labels for the "
            f"{len(mesh.axes)} axes of {mesh}."
        )
    known = [choice.label for choice in op.choices]
    for label, axis in zip(labels, mesh.names, strict=True):
        if label not in known:
            raise PlanError(
                f"The plan is damaged: op {op.name} ({op.kind}) has the label {label!r} on {axis}, "
                f"and its choices are {', '.join(known)}."
            )
    if not go_together(labels):
        raise PlanError(
            f"The plan is damaged: op {op.name} ({op.kind}) has the labels {' '.join(labels)}. Rows change hands "
            "along all axes that split the experts (t>e), or along none (e)."
        )
    if not is_legal(analysis.graph, op, labels, mesh):
        sizes = ", ".join(f"{c.label} of size {c.size}" for c in op.choices if c.splits)
        raise PlanError(
            f"The plan is damaged: op {op.name} ({op.kind}) has the labels {' '.join(labels)}, "
            f"and the mesh {mesh} does not divide what they split; it can split {sizes}."
        )


def _check_versions(plan: Plan, schedule: str) -> None:
    """Raises PlanError if parameters are not used as they are stored, which schedules with versions do not support."""
    if plan.precision is not None:
        raise PlanError(
            f"The plan casts parameters for use (precision {plan.precision}), and its schedule {schedule} keeps "
            "several versions of parameters, which are stored as they are used so far. Leave precision out, or take "
            "1f1b."
        )
    for name, how in plan.parameters.items():
        used = tuple(R if state == V else state for state in how.resident)
        if used != how.storage or how.tier != "device":
            raise PlanError(
                f"Parameter {name} is stored {how.stored_text(plan.mesh)} and used as "
                f"{format_layout(how.resident, plan.mesh)}, and the schedule {schedule} keeps several versions of "
                "parameters, which are stored as they are used so far. Take a recipe such as ddp or tp, or 1f1b."
            )


def _check_cuts(cuts: tuple[str, ...], analysis: Analysis) -> None:
    position = {op.name: i for i, op in enumerate(analysis.graph.ops)}
    unknown = [name for name in cuts if name not in position]
    if unknown:
        raise PlanError(f"The plan is damaged: a stage begins with {unknown[0]}, which is no op.")
    places = [position[name] for name in cuts]
    if any(a >= b for a, b in itertools.pairwise(places)):
        raise PlanError(
            f"The plan is damaged: its stages begin with {', '.join(cuts)}, which is not the order of "
            "these ops in the model."
        )


def _difference(graph: Graph, plan: Plan) -> str:
    """Words for the first difference between a graph and the graph for which a plan was made."""
    ours, theirs = set(graph.parameters), set(plan.parameters)
    for names, what in ((theirs - ours, "has no"), (ours - theirs, "also has")):
        if names:
            return f"it {what} parameter {min(names)}"
    ours, theirs = set(graph.inputs), set(plan.inputs)
    for names, what in ((theirs - ours, "has no"), (ours - theirs, "also has")):
        if names:
            return f"it {what} input {min(names)}"
    return _shape_difference(graph, plan) or _op_difference(graph, plan)


def _shape_difference(graph: Graph, plan: Plan) -> str:
    for name, shape in graph.edge_shapes.items():
        planned = plan.shapes.get(name, shape)
        if planned != shape:
            is_part = name.startswith("input ") and plan.micro_batches > 1
            part = f" in each of {plan.micro_batches} micro-batches" if is_part else ""
            return (
                f"its {name} has the shape {list(shape)}, and the plan takes {list(planned)}{part}"
            )
    return ""


def _op_difference(graph: Graph, plan: Plan) -> str:
    for ours, theirs in itertools.zip_longest((op.name for op in graph.ops), plan.ops):
        if ours != theirs:
            return (
                f"where the plan has {theirs or 'no further op'}, it runs {ours or 'nothing more'}"
            )
    return "an op has other arguments, or a tensor another dtype"
