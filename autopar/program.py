"""A program: the captured model rewritten for one rank, with what is needed to feed and read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.factors import Analysis, output_nodes
from autopar.ir import Dims, Layout, ParameterPlan, Plan, R
from autopar.passes import partition, verify_graph


@dataclass(frozen=True)
class TensorSpec:
    """A tensor at the edge of a program.

    Attributes:
        name: qualified name of a parameter or buffer, or name of an input.
        dims: factors of its dims, globally.
        dtype: its element type.
        layout: of the local part that the program takes or returns.
    """

    name: str
    dims: Dims
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Program:
    """What one rank runs: `module(*parameters, *buffers, *constants, *inputs)`, all local.

    Attributes:
        module: the local graph; collectives name mesh axes until they are bound to process groups.
        plan: what it carries out.
        parameters: in argument order; their layout is the resident one.
        buffers: in argument order, replicated.
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
        is_step: whether the only output is the loss.
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

    def storage(self, name: str) -> ParameterPlan:
        """The plan of a parameter."""
        return self.plan.parameters[name]


def build_program(captured: Captured, analysis: Analysis, plan: Plan) -> Program:
    """Carries out a plan. Raises PlanError where it was made for another model."""
    check_plan(captured, analysis, plan)
    module, layouts = partition(captured, analysis, plan)
    verify_graph(module, after="partition")
    placeholders = {
        n.name: n.meta.get("val") for n in captured.module.graph.find_nodes(op="placeholder")
    }

    def spec(node: str, name: str, layout: Layout) -> TensorSpec:
        value, tensor = placeholders[node], analysis.graph.tensors[node]
        return TensorSpec(name, tensor.dims, tuple(value.shape), value.dtype, layout)

    replicated = (R,) * len(plan.mesh.axes)
    parameters = captured.parameters.items()
    outputs, literals = _outputs(captured, analysis, layouts)
    return Program(
        module=module,
        plan=plan,
        parameters=tuple(spec(k, v, plan.parameters[v].resident) for k, v in parameters),
        buffers=tuple(spec(k, v, replicated) for k, v in captured.buffers.items()),
        constants=tuple(captured.constants.values()),
        inputs=tuple(spec(k, v, plan.inputs[v]) for k, v in captured.inputs.items()),
        in_spec=captured.in_spec,
        literals=captured.literals,
        outputs=outputs,
        out_spec=captured.out_spec,
        out_literals=literals,
        mutated=captured.mutated,
        tied=captured.tied,
        frozen=captured.frozen,
        is_step=captured.is_step,
    )


def _outputs(
    captured: Captured, analysis: Analysis, layouts: tuple[Layout, ...]
) -> tuple[tuple[TensorSpec, ...], dict[int, Any]]:
    specs = []
    for node, layout in zip(output_nodes(captured.module), layouts, strict=True):
        tensor, value = analysis.graph.tensors[analysis.names[node.name][0]], node.meta["val"]
        specs.append(TensorSpec(node.name, tensor.dims, tuple(value.shape), value.dtype, layout))
    output = next(iter(captured.module.graph.find_nodes(op="output"))).args[0]
    own = list(output)[len(captured.mutated) :]
    literals = {i: leaf for i, leaf in enumerate(own) if not isinstance(leaf, fx.Node)}
    return tuple(specs[len(captured.mutated) :]), literals


def check_plan(captured: Captured, analysis: Analysis, plan: Plan) -> None:
    """Raises PlanError, saying which, unless the plan was made for this captured model."""
    if plan.fingerprint != captured.fingerprint:
        raise PlanError(
            f"The plan was made for a model with fingerprint {plan.fingerprint}, and this one has "
            f"{captured.fingerprint}: {_difference(analysis, plan)}. Make a plan for this model."
        )


def _difference(analysis: Analysis, plan: Plan) -> str:
    ours, theirs = set(analysis.graph.parameters), set(plan.parameters)
    for names, what in ((theirs - ours, "has no"), (ours - theirs, "also has")):
        if names:
            return f"it {what} parameter {min(names)}"
    return "shapes, inputs or ops differ"
