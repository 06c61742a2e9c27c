"""Time and memory of a plan: the figures by which a search ranks plans, and which an explanation prints.

`autopar.cost_model.pricer` lists the work and memory of the plan. For a plan without stages, the formulas of
`autopar.cost_model.steps.step` add them up; for a plan with stages, its schedule is simulated
(`autopar.pipeline.executed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from autopar.cost_model.buckets import buckets_hide
from autopar.cost_model.items import FULL, TOUCHED, TrainingState
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.memory import KeptSlice, Selected
from autopar.cost_model.owners import has_lone_ops, owners_of_ops
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.cost_model.steps.run import Run, total
from autopar.cost_model.steps.step import Step
from autopar.ir import Graph, Plan, Tier
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.parts import is_whole, ops_recomputed_by, parts_of_ops
from autopar.pipeline.recomputable import selected
from autopar.pipeline.saved_values import SavedValues


class Figures(TypedDict):
    """What prices a plan, as keyword arguments of `composed` and of the other functions of this module.

    Attributes:
        hardware: figures of the machine.
        software: figures of the runtime.
        training_state: gradients and optimizer states that training keeps for each parameter.
    """

    hardware: Hardware
    software: Software
    training_state: TrainingState


class Composed(NamedTuple):
    """Time and memory of a plan.

    Attributes:
        step_seconds: duration of a step.
        peak_bytes: peak memory of the fullest rank, including memory that tensors cannot use.
    """

    step_seconds: float
    peak_bytes: float


def composed(
    graph: Graph, plan: Plan, hardware: Hardware, *, software: Software = AUTOPAR, training_state: TrainingState = FULL
) -> Composed:
    """Time and memory of a plan, as `Explanation.step_seconds` and `memory_bytes` print them.

    Args:
        graph: the captured model, at the size of one micro-batch.
        plan: plan with or without stages.
        hardware: figures of the machine.
        software: figures of the runtime, which replace some of the machine's.
        training_state: gradients and optimizer states that training keeps for each parameter.
    """
    if plan.pipeline is not None:
        executed = ExecutedStep(graph, plan, hardware, training_state, software)
        return Composed(executed.seconds, executed.memory_bytes)
    return _price_of(step_of(graph, plan, hardware, software=software, training_state=training_state))


def _price_of(step: Step) -> Composed:
    return Composed(float(step.seconds()), float(step.peak_bytes()))


def stored_bytes(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    tier: Tier,
    *,
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
) -> float:
    """Bytes that the fullest rank stores in the tier host or nvme; other arguments as in `composed`."""
    if plan.pipeline is not None:
        return ExecutedStep(graph, plan, hardware, training_state, software).stored_bytes(tier)
    step = step_of(graph, plan, hardware, software=software, training_state=training_state, with_items=False)
    return float(total(step.stored(tier)))


def state_bytes(graph: Graph, plan: Plan, hardware: Hardware, training_state: TrainingState = FULL) -> float:
    """Bytes of parameters, gradients and optimizer states on a device, as the mean over stages."""
    whole = replace(plan, pipeline=None)
    step = step_of(graph, whole, hardware, training_state=training_state, with_items=False)
    stages = plan.pipeline.ranks if plan.pipeline else 1
    return sum(float(step.held(kind, "first")) for kind in TOUCHED) / stages


def step_of(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
    with_items: bool = True,
) -> Step:
    """The step of a plan without stages, in numbers; arguments as in `composed`.

    Args:
        with_items: whether the step has its work; without it only its memory can be asked.
    """
    machine = software.on(hardware)
    blocks = RecomputationPrice.of(graph, plan)
    pricer = Pricer(
        graph,
        plan,
        sizes=Sizes(plan.mesh),
        hardware=machine,
        links=[machine.link(plan.mesh, axis) for axis in range(len(plan.mesh.axes))],
        training_state=training_state,
        blocks=blocks.blocks,
        again=blocks.again,
        selected=blocks.selected,
        slices=blocks.slices,
        meeting_link=machine.link(plan.world_mesh, 0) if plan.meeting else None,
    )
    run = Run(
        plan.micro_batches, recompute=blocks.left, training_state=training_state, overlap_batches=plan.overlap_batches
    )
    step = Step(
        tuple(pricer.items()) if with_items else (),
        tuple(pricer.holdings()),
        run,
        machine,
        software,
        layers=sum(stack.layers for stack in graph.stacks) or 1,
        boundary_bytes=pricer.boundary_bytes(),
        buckets_hide=buckets_hide(graph, plan, pricer.flow),
    )
    if not has_lone_ops(plan):
        return step
    order = pricer.in_order() if with_items else ()
    held = {at: tuple(pricer.at(at).holdings()) for at in owners_of_ops(plan)}
    return OwnedStep.of(step, plan.mesh.names, order, held)


@dataclass(frozen=True)
class StepCost:
    """Time of a training step and memory of a rank without stages, by kind.

    Attributes:
        compute_seconds: ops in forward and backward, accumulation of gradients, and casts of parameters.
        conversion_seconds: communication of activations and their gradients.
        parameter_seconds: communication of parameters and their gradients.
        other_seconds: optimizer, waiting for the host, and fixed time, less the communication that overlaps with
            compute.
        parameter_bytes, gradient_bytes, optimizer_bytes, saved_bytes, buffer_bytes: lasting memory, by kind.
        transient_bytes: memory that exists only while one block runs.
        reserved_bytes: memory that tensors cannot use.
        axis_seconds: pairs of a mesh axis along which something is sent, and the time that this takes.
        price: time and memory of the step as `composed` gives them, without the rounding of kinds.
    """

    compute_seconds: float
    conversion_seconds: float
    parameter_seconds: float
    other_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    buffer_bytes: int
    transient_bytes: int
    reserved_bytes: int
    axis_seconds: tuple[tuple[str, float], ...]
    price: Composed

    @classmethod
    def of(cls, step: Step) -> StepCost:
        """Computes the parts of a step's time and memory."""
        sums = {"": 0.0, "activation": 0.0, "parameter": 0.0, "gradient": 0.0}
        along = dict.fromkeys(step.axes, 0.0)
        for item in step.items:
            times = step.run.micro_batches * step.times(item) if item.every_micro_batch else 1
            seconds = float(times * item.count * item.seconds)
            sums[item.carries] += seconds
            if item.resource in along:
                along[item.resource] += seconds
        held = {term.name: round(term.value) for term in step.memory("first")}
        moved = sums["parameter"] + sums["gradient"]
        return cls(
            sums[""],
            sums["activation"],
            moved,
            float(step.seconds()) - sum(sums.values()),
            held["parameters"],
            held["gradients"],
            held["optimizer"],
            held["saved activations"],
            held["buffers"],
            held["transient peak"],
            held["reserved"],
            tuple(along.items()),
            _price_of(step),
        )

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return self.compute_seconds + self.conversion_seconds + self.parameter_seconds + self.other_seconds

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a rank."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.saved_bytes
            + self.buffer_bytes
            + self.transient_bytes
            + self.reserved_bytes
        )


def cost_of(
    graph: Graph, plan: Plan, hardware: Hardware, *, software: Software = AUTOPAR, training_state: TrainingState = FULL
) -> StepCost:
    """Time and memory of a plan without stages, by kind; arguments as in `composed`."""
    return StepCost.of(step_of(graph, plan, hardware, software=software, training_state=training_state))


class RecomputationPrice(NamedTuple):
    """How the recomputation of a plan is priced: as items of single ops, or by the formulas of a step.

    Attributes:
        blocks: op name -> index of its block, or of the part of the block in a stage; None for a graph without
            blocks, or without some layers of the model.
        again: names of the ops in recomputed blocks; the items contain their second runs.
        left: recomputation that is not in the items, so that `autopar.cost_model.steps.step` must add it; "none" if
            there is no such recomputation.
        selected: single ops that are recomputed; the items contain their second runs. None if whole blocks are
            recomputed.
        slices: tensors that blocks save in slices; the items contain their gathers.
    """

    blocks: Mapping[str, int] | None
    again: frozenset[str]
    left: Recompute
    selected: Selected | None = None
    slices: tuple[KeptSlice, ...] = ()

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> RecomputationPrice:
        """Finds the blocks of a graph and those that a plan recomputes."""
        if not has_blocks(graph) or not is_whole(graph):
            return cls(None, frozenset(), plan.recompute)
        slices = SavedValues(graph, plan).slices
        if plan.pipeline is not None:
            return cls(parts_of_ops(graph, plan), frozenset(), plan.recompute, slices=slices)
        if isinstance(plan.recompute, Selection):
            chosen = selected(graph, plan, plan.recompute)
            return cls(parts_of_ops(graph, plan), frozenset(), "none", chosen, slices)
        again = ops_recomputed_by(graph, plan) if plan.recompute != "none" else frozenset()
        return cls(parts_of_ops(graph, plan), again, "none", slices=slices)
