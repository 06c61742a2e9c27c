"""From a module to a plan: capture, clean up, analyze, search. Needs no process group and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture import Captured, LossFunction, capture_forward, capture_step
from autopar.cost_model import Hardware
from autopar.errors import MeshError, StepError
from autopar.factors import Analysis, analyze
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, ParameterPlan, Plan, R, State
from autopar.passes import clean_up
from autopar.search import RecipeLike, search, search_mesh


@dataclass(frozen=True)
class Prepared:
    """A captured, cleaned and analyzed model."""

    captured: Captured
    analysis: Analysis


def prepare_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
) -> Prepared:
    """Captures forward and loss of one micro-batch. Raises CaptureError or StepError."""
    prepared = _prepared(capture_step(model, args, dict(kwargs or {}), loss_fn))
    graph = prepared.analysis.graph
    if not graph.tensors[graph.outputs[-1]].needs_grad:
        raise StepError(
            "No gradient flows from the loss to any parameter: all are frozen or detached, or the model "
            "uses torch.utils.checkpoint with use_reentrant=True (False can be captured)."
        )
    return prepared


def prepare_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Prepared:
    """Captures the forward alone. Raises CaptureError."""
    return _prepared(capture_forward(model, args, dict(kwargs or {})))


def _prepared(captured: Captured) -> Prepared:
    clean_up(captured.module)
    return Prepared(captured, analyze(captured))


def make_plan(
    prepared: Prepared,
    mesh: Mesh | Mapping[str, int] | None,
    *,
    world_size: int | None = None,
    hardware: Hardware,
    recipe: RecipeLike = "auto",
    pins: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    micro_batches: int = 1,
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """Searches a plan; without a mesh its shape is searched too, for `world_size` ranks.

    Raises MeshError, RecipeError or SearchError where none can be.
    """
    graph, fingerprint = prepared.analysis.graph, prepared.captured.fingerprint
    if mesh is None:
        assert world_size is not None and not fixed_storage, "a searched mesh needs a world size"
        plan = search_mesh(
            graph, world_size, hardware=hardware, recipe=recipe, pins=pins,
            memory_bytes=memory_bytes, micro_batches=micro_batches, fingerprint=fingerprint,
        )  # fmt: skip
        return take_parts(plan, graph)
    mesh = Mesh.of(mesh)
    refuse_pipeline(mesh)
    plan = search(
        graph, mesh, hardware=hardware, recipe=recipe, pins=pins, memory_bytes=memory_bytes,
        micro_batches=micro_batches, fingerprint=fingerprint, fixed_storage=fixed_storage,
    )  # fmt: skip
    return take_parts(plan, graph)


def take_parts(plan: Plan, graph: Graph) -> Plan:
    """The plan with every input in the part that all its users take.

    To take the whole and slice it costs as little, but then a rank could not be given its part alone.
    """
    inputs = {
        name: tuple(
            _agreed_state(plan, graph, graph.inputs[name], axis, state)
            for axis, state in enumerate(layout)
        )
        for name, layout in plan.inputs.items()
    }
    return replace(plan, inputs=inputs)


def _agreed_state(plan: Plan, graph: Graph, tensor: str, axis: int, state: State) -> State:
    wanted = {
        op.choice(plan.ops[op.name][axis]).operands[i]
        for op in graph.ops
        for i, operand in enumerate(op.operands)
        if operand == tensor
    }
    only = wanted.pop() if len(wanted) == 1 else state
    splits_rows = only.kind == "S" and only.factor == 0
    return only if state == R and splits_rows else state


def refuse_pipeline(mesh: Mesh) -> None:
    """Raises MeshError if an axis asks for pipeline stages, which this version has not."""
    if PIPELINE_AXIS in mesh.names:
        raise MeshError(
            f"The axis {PIPELINE_AXIS!r} of {mesh} is reserved for pipeline stages, which this "
            "version of autopar does not have; give its ranks to another axis, such as dp or tp."
        )


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of an example: a tuple or list, a dict of keyword arguments, or one input."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
