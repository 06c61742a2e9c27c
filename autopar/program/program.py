"""A program: the captured model rewritten for one rank, with what is needed to feed and read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autopar import rules
from autopar._torch import pytree
from autopar.analysis.extras import Extra, extras_of, refuse_split_extras
from autopar.analysis.factors import Analysis
from autopar.analysis.objective import BatchCapture, MicroBatch, Objective, objective_of
from autopar.capture.captured import Captured
from autopar.errors import StepError
from autopar.ir import Dims, Layout, Mesh, ParameterPlan, Plan, R, Tier, local_shape
from autopar.ir.share import on
from autopar.ops.alone import Alone, alone
from autopar.ops.collectives import FUNCTIONAL, Collective
from autopar.ops.nodes import draws, output_nodes, reached
from autopar.passes import partition, verify_graph
from autopar.program.checks import check_plan
from autopar.program.recomputation import mark_blocks
from autopar.program.slices import SavedSlice, note_slices
from autopar.program.term_shares import multiply_terms, put_together

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
        shape: shape on a rank of a stage that has some of it, see `autopar.ir.share`.
        needs_grad: whether a gradient comes back.
        owners: axis and position along it of the ranks that have some of it; none if all ranks have.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    owners: tuple[tuple[str, int], ...] = ()

    def shape_on(self, rank: int, mesh: Mesh) -> tuple[int, ...]:
        """Shape on a rank of a stage's mesh; a rank that has nothing sends a tensor without elements."""
        has_some = Alone(self.owners).runs_on(rank, mesh)
        shape = on(self.shape, rank)
        return shape if has_some else (0, *shape[1:])


@dataclass(frozen=True)
class Program:
    """The program of one rank: `module(*parameters, *buffers, *constants, *inputs, *shares, *received)`.

    All are local. It returns new values of buffers, outputs, and the tensors to send. Pipeline stages have programs,
    too (`autopar.program.stages`); the program of a whole model receives and sends nothing.

    Attributes:
        module: the local graph; collectives name mesh axes until they are bound to process groups.
        plan: plan that the program carries out.
        parameters: parameters in argument order; their layout is the resident one.
        buffers: buffers in argument order, replicated.
        constants: tensors that the model's code holds.
        inputs: tensor inputs, in pytree order.
        shares: shares of the terms of a loss in those of the batch, without dims (`autopar.program.term_shares`).
        in_spec: pytree of (args, kwargs).
        literals: leaf position -> the value built into the graph, for inputs that are no tensor.
        outputs: local outputs after the new values of mutated buffers, tensors only.
        out_spec: pytree of the model's result.
        out_literals: leaf position of the result -> value, for leaves that are no tensor.
        mutated: output position -> name of the buffer that the output updates; such outputs come first.
        tied: further names of tied parameters -> their first name.
        frozen: parameters that require no gradient.
        differentiable: inputs to which gradients flow.
        is_step: whether the last output is the loss; those before it are the step's extra results.
        has_more: whether the model returned the loss of a step among other things, as those of transformers do.
        received: tensors that the previous stage sends.
        sent: tensors that the stage sends to the next one.
        places: position of each output of a stage among the outputs of the whole model.
        recomputed: indices of the blocks that backward recomputes; every call of the module has the number
            of its block in `meta["block"]`.
        slices: name in a mark of a tensor that is saved in slices -> its slice (`autopar.program.slices`).
        objective: how the loss of a batch comes from the losses of its micro-batches.
        extras: how each extra result of a step comes from those of its micro-batches.
        smaller: the program of the last micro-batches, where these have fewer rows than the first.
        first_smaller: number of the first of them; 0 where all micro-batches have as many rows.
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
    places: tuple[int, ...] = ()
    recomputed: frozenset[int] = frozenset()
    objective: Objective = _MEAN
    extras: tuple[Extra, ...] = ()
    slices: Mapping[str, SavedSlice] = field(default_factory=dict)
    shares: tuple[TensorSpec, ...] = ()
    differentiable: frozenset[str] = frozenset()
    smaller: Program | None = None
    first_smaller: int = 0

    def of(self, micro_batch: int) -> Program:
        """The program of a micro-batch: this one, or that of the last micro-batches, which may be smaller."""
        return self if self.smaller is None or micro_batch < self.first_smaller else self.smaller

    @cached_property
    def has_lone_calls(self) -> bool:
        """Whether some ranks alone run a call, because tensors are in a state O."""
        return any(alone(node) for node in self.module.graph.nodes)

    @cached_property
    def communicates(self) -> bool:
        """Whether every rank waits for others in a forward, which none of them then runs by itself."""
        calls = map(Collective.of, self.module.graph.nodes)
        return any(call is not None and call.name in FUNCTIONAL for call in calls)

    @cached_property
    def graded(self) -> frozenset[str]:
        """The parameters to which a gradient flows from the loss, or from the outputs of a forward."""
        (output,) = self.module.graph.find_nodes(op="output")
        results = [x for x in output.args[0] if isinstance(x, fx.Node)][len(self.mutated) :]
        stops = rules.NOT_DIFFERENTIABLE
        nodes = reached(
            results[-1:] if self.is_step else results,
            lambda node: () if rules.operator_name(node) in stops else node.all_input_nodes,
        )
        inputs = self.module.graph.find_nodes(op="placeholder")
        return frozenset(spec.name for spec, node in zip(self.parameters, inputs, strict=False) if node in nodes)

    @cached_property
    def is_random(self) -> bool:
        """Whether some op of the program draws random numbers."""
        return any(draws(node) for node in self.module.graph.nodes)

    @cached_property
    def input_parts(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the part of every input that a rank takes; it has shares where parts differ in size."""
        mesh = self.plan.mesh
        return tuple(local_shape(spec.dims, spec.layout, mesh) for spec in self.inputs)

    def term_shares(self, parts: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """For every micro-batch the inputs `shares` of its program by name, on the CPU."""
        if not self.shares:
            return [{} for _ in parts]
        found = self.objective.term_shares(parts)
        return [
            {
                spec.name: torch.tensor(share, dtype=spec.dtype)
                for spec, share in zip(self.of(i).shares, own, strict=True)
            }
            for i, own in enumerate(found)
        ]

    def storage(self, name: str) -> ParameterPlan:
        """The plan of a parameter."""
        return self.plan.parameters[name]


def build_program(captured: Captured, analysis: Analysis, plan: Plan, batch: BatchCapture | None = None) -> Program:
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
    batch = batch or BatchCapture(captured, analysis.graph)
    objective = _MEAN if plan.micro_batches == 1 else put_together(objective_of(captured, batch), plan)
    objective, shares = multiply_terms(module, captured, objective)
    verify_graph(module, after="partition")
    specs = _ArgumentSpecs(captured, analysis, plan)
    extras = extras_of(captured, analysis.graph, batch)
    refuse_split_extras(extras, plan.micro_batches)
    outputs = _outputs(captured, analysis, layouts)
    recomputed = mark_blocks(module, analysis.graph, plan)
    return Program(
        module=module,
        plan=plan,
        parameters=specs.parameters(),
        buffers=specs.buffers(),
        constants=tuple(captured.constants.values()),
        inputs=specs.inputs(),
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
        objective=objective,
        extras=extras,
        shares=tuple(specs.without_dims(*share) for share in shares),
        differentiable=frozenset(captured.inputs[name] for name in captured.differentiable),
    )


class _ArgumentSpecs:
    """The specs of the arguments of a program, under a plan of the captured model."""

    def __init__(self, captured: Captured, analysis: Analysis, plan: Plan) -> None:
        self._captured, self._tensors, self._plan = captured, analysis.graph.tensors, plan
        nodes = captured.module.graph.find_nodes(op="placeholder")
        self._values = {node.name: node.meta.get("val") for node in nodes}

    def parameters(self) -> tuple[TensorSpec, ...]:
        return tuple(self._parameter(k, v) for k, v in self._captured.parameters.items())

    def buffers(self) -> tuple[TensorSpec, ...]:
        replicated = (R,) * len(self._plan.mesh.axes)
        return tuple(self._described(k, v, replicated) for k, v in self._captured.buffers.items())

    def inputs(self) -> tuple[TensorSpec, ...]:
        layouts = self._plan.inputs
        return tuple(self._described(k, v, layouts[v]) for k, v in self._captured.inputs.items())

    def without_dims(self, name: str, dtype: torch.dtype) -> TensorSpec:
        """The spec of a number that all ranks have."""
        return TensorSpec(name, (), (), dtype, (R,) * len(self._plan.mesh.axes))

    def _described(self, node: str, name: str, layout: Layout) -> TensorSpec:
        value, tensor = self._values[node], self._tensors[node]
        return TensorSpec(name, tensor.dims, tuple(value.shape), value.dtype, layout)

    def _parameter(self, node: str, name: str) -> TensorSpec:
        how = self._plan.parameters[name]
        found = self._described(node, name, how.resident)
        reduced = self._captured.gradient_dtype(name, found.dtype)
        return replace(found, reduced=reduced, tier=how.resident_tier)


def _outputs(captured: Captured, analysis: Analysis, layouts: tuple[Layout, ...]) -> tuple[TensorSpec, ...]:
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


def with_smaller(program: Program, smaller: Program, first: int) -> Program:
    """The program whose micro-batches from number `first` on run by another one.

    Of 30 samples in 4 micro-batches two have 8 and two have 7. Both are programs of one model with one layout of its
    parameters. A step adds their gradients up.

    Raises StepError where their results have nothing in common by which those of the batch are known.
    """
    difference = _difference(program, smaller)
    if difference:
        raise StepError(
            f"Micro-batches of {_rows(program)} and of {_rows(smaller)} rows {difference}, so that they give no result "
            "of the batch. Take a number of micro-batches that divides the batch, or a batch that it divides."
        )
    return replace(program, smaller=smaller, first_smaller=first)


def _rows(program: Program) -> int:
    return max((spec.shape[0] for spec in program.inputs if spec.shape), default=1)


def _difference(program: Program, smaller: Program) -> str:
    """What two programs of a model have not in common, as a verb and its object; "" if nothing."""
    if program.parameters != smaller.parameters or program.mutated != smaller.mutated:
        return "use different parameters, or change different buffers"
    if program.objective.form != smaller.objective.form:
        return "compute different losses"
    extras = zip(program.extras, smaller.extras, strict=False)
    if len(program.extras) != len(smaller.extras) or any(a.form != b.form for a, b in extras):
        return "return different results"
    return ""
