"""From a module to a plan: capture, clean up, analyze, search. Needs no process group and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from autopar.capture import Captured, LossFunction, capture_forward, capture_step
from autopar.cost_model import Hardware
from autopar.errors import MeshError, StepError
from autopar.factors import Analysis, analyze
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, ParameterPlan, Plan, R, State, with_pipeline
from autopar.ir.plan import Recompute
from autopar.passes import clean_up
from autopar.search import RecipeLike, search
from autopar.search.pipeline import search_pipeline, search_pipeline_mesh


@dataclass(frozen=True)
class StageWishes:
    """What a caller asks of pipeline stages and recomputation; None leaves it to the search.

    Attributes:
        schedule: one of `autopar.ir.SCHEDULES`.
        chunks: stages of each pipeline rank.
        recompute: whether layers run again in backward.
    """

    schedule: str | None = None
    chunks: int | None = None
    recompute: Recompute | None = None

    def refuse_schedule(self, mesh: Mesh) -> None:
        """Raises MeshError if a schedule is asked for on a mesh without stages."""
        if self.schedule is not None or self.chunks is not None:
            raise MeshError(
                f"schedule={self.schedule!r} and chunks={self.chunks} are of pipeline stages, and the mesh "
                f"{mesh} has no axis {PIPELINE_AXIS!r}: add one, such as {PIPELINE_AXIS}=2, or leave them out."
            )


NO_WISHES = StageWishes()

# What PyTorch takes on the CPU for an op of no size: 20 us for forward and backward, two to three kernels,
# of a GPT of width 8 on one core of a cloud server, torch 2.13.
_ISSUE_SECONDS = 10e-6


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
    micro_batches: int | None = None,
    captured_micro_batches: int | None = None,
    stages: StageWishes = NO_WISHES,
    fixed_storage: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """Searches a plan; without a mesh its shape is searched too, for `world_size` ranks.

    Args:
        micro_batches: of a step; None leaves them open where there are stages, and is 1 elsewhere.
        captured_micro_batches: how many of the captured batch make a step; by default `micro_batches`.
        stages: what is asked of a pipeline and of recomputation.

    Raises MeshError, RecipeError or SearchError where none can be.
    """
    graph = prepared.analysis.graph
    settings: dict[str, Any] = {
        "hardware": hardware, "recipe": recipe, "pins": pins, "memory_bytes": memory_bytes,
        "fingerprint": prepared.captured.fingerprint,
    }  # fmt: skip
    outer = {
        **settings, "hardware": _issuing(hardware), **asdict(stages), "micro_batches": micro_batches,
        "captured_micro_batches": captured_micro_batches or micro_batches or 1,
    }  # fmt: skip
    if mesh is None:
        assert world_size is not None and not fixed_storage, "a searched mesh needs a world size"
        return take_parts(search_pipeline_mesh(graph, world_size, **outer).plan, graph)
    mesh = Mesh.of(mesh)
    if PIPELINE_AXIS in mesh.names:
        return take_parts(search_pipeline(graph, mesh, **outer).plan, graph)
    stages.refuse_schedule(mesh)
    if stages.recompute == "full":
        return take_parts(_recomputing(graph, mesh, outer), graph)
    plan = search(
        graph, mesh, **settings, micro_batches=micro_batches or 1, fixed_storage=fixed_storage
    )
    return take_parts(plan, graph)


def _issuing(hardware: Hardware) -> Hardware:
    """The hardware with the time that it takes to issue an op, without which micro-batches would be free."""
    return hardware if hardware.host_seconds else replace(hardware, host_seconds=_ISSUE_SECONDS)


def _recomputing(graph: Graph, mesh: Mesh, settings: Mapping[str, Any]) -> Plan:
    """A plan without stages is one of a pipeline of one rank, whose schedule is of no account."""
    whole = with_pipeline(mesh, 1, 0)
    settings = {**settings, "schedule": "gpipe", "micro_batches": settings["micro_batches"] or 1}
    return replace(search_pipeline(graph, whole, **settings).plan, pipeline=None)


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


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of an example: a tuple or list, a dict of keyword arguments, or one input."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
