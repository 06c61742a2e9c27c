"""The price of a plan: what a search ranks plans by is what an explanation prints.

A plan without stages is composed by the formulas of `autopar.cost_model.step`, a plan with stages by
running its schedule (`autopar.pipeline.executed`), both over the items and holdings of
`autopar.cost_model.pricer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_model.hardware import Hardware
from autopar.cost_model.items import FULL, TOUCHED, TrainingState
from autopar.cost_model.memory import KeptSlice, Selected
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import Sizes
from autopar.cost_model.software import AUTOPAR, Software
from autopar.cost_model.step import Run, Step, total
from autopar.ir import Graph, Plan, Tier
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.parts import is_whole, ops_again, parts_of_ops
from autopar.pipeline.recomputable import selected
from autopar.pipeline.saved_values import SavedValues


class Composed(NamedTuple):
    """Time and memory of a plan.

    Attributes:
        step_seconds: duration of a step.
        peak_bytes: peak memory of the fullest rank, with the memory that no tensor can have.
    """

    step_seconds: float
    peak_bytes: float


def composed(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
) -> Composed:
    """Time and memory of a plan, as `Explanation.step_seconds` and `memory_bytes` print them.

    Args:
        graph: the captured model, at the size of one micro-batch.
        plan: its choices, with or without stages.
        hardware: the machine, as its catalogue has it.
        software: figures of the runtime, which change those of the machine.
        training_state: bytes that training keeps in addition to parameters.
    """
    if plan.pipeline is not None:
        executed = ExecutedStep(graph, plan, hardware, training_state, software)
        return Composed(executed.seconds, executed.memory_bytes)
    step = step_of(graph, plan, hardware, software=software, training_state=training_state)
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
    """What the fullest rank keeps in a tier besides the device; arguments as in `composed`."""
    if plan.pipeline is not None:
        return ExecutedStep(graph, plan, hardware, training_state, software).stored_bytes(tier)
    step = step_of(graph, plan, hardware, software=software, training_state=training_state)
    return float(total(step.stored(tier)))


def state_bytes(
    graph: Graph, plan: Plan, hardware: Hardware, training_state: TrainingState = FULL
) -> float:
    """Parameters on the device of an average stage, with their gradients and optimizer states."""
    whole = replace(plan, pipeline=None)
    step = step_of(graph, whole, hardware, training_state=training_state)
    stages = plan.pipeline.ranks if plan.pipeline else 1
    return sum(float(step.held(kind, "first")) for kind in TOUCHED) / stages


def step_of(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
) -> Step:
    """The step of a plan without stages, in numbers; arguments as in `composed`."""
    machine = software.on(hardware)
    blocks = RecomputationPrice.of(graph, plan)
    pricer = Pricer(
        graph, plan, sizes=Sizes(plan.mesh), hardware=machine,
        links=[machine.link(plan.mesh, axis) for axis in range(len(plan.mesh.axes))],
        training_state=training_state, blocks=blocks.blocks, again=blocks.again,
        selected=blocks.selected, slices=blocks.slices,
        meeting_link=machine.link(plan.world_mesh, 0) if plan.meeting else None,
    )  # fmt: skip
    run = Run(plan.micro_batches, recompute=blocks.left, training_state=training_state)
    return Step(
        tuple(pricer.items()), tuple(pricer.holdings()), run, machine, software,
        layers=sum(stack.layers for stack in graph.stacks) or 1,
        boundary_bytes=pricer.boundary_bytes(),
    )  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """Time of a training step and memory of a rank without stages, by kind.

    Attributes:
        compute_seconds: ops, forward and backward, gradients added up and parameters cast.
        conversion_seconds: activations and their gradients, sent to other ranks.
        parameter_seconds: parameters and their gradients, sent to other ranks.
        other_seconds: the optimizer, waiting for the host, and what is fixed, less what is hidden.
        parameter_bytes, gradient_bytes, optimizer_bytes, saved_bytes, buffer_bytes: memory that lasts.
        transient_bytes: memory that is there for a moment.
        reserved_bytes: memory that no tensor can have.
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

    @classmethod
    def of(cls, step: Step) -> StepCost:
        """The parts of a step."""
        sums = {"": 0.0, "activation": 0.0, "parameter": 0.0, "gradient": 0.0}
        for item in step.items:
            times = step.run.micro_batches * step.times(item) if item.every_micro_batch else 1
            sums[item.carries] += float(times * item.count * item.seconds)
        held = {term.name: round(term.value) for term in step.memory("first")}
        moved = sums["parameter"] + sums["gradient"]
        return cls(
            sums[""], sums["activation"], moved,
            float(step.seconds()) - sum(sums.values()),
            held["parameters"], held["gradients"], held["optimizer"], held["saved activations"],
            held["buffers"], held["transient peak"], held["reserved"],
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return (
            self.compute_seconds
            + self.conversion_seconds
            + self.parameter_seconds
            + self.other_seconds
        )

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a rank."""
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.saved_bytes
            + self.buffer_bytes + self.transient_bytes + self.reserved_bytes
        )  # fmt: skip


def cost_of(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    software: Software = AUTOPAR,
    training_state: TrainingState = FULL,
) -> StepCost:
    """Time and memory of a plan without stages, by kind; arguments as in `composed`."""
    return StepCost.of(
        step_of(graph, plan, hardware, software=software, training_state=training_state)
    )


class RecomputationPrice(NamedTuple):
    """Which part of a plan's recomputation the items price, and which the formulas of a step add.

    Attributes:
        blocks: op -> number of its block, or of the part of it in a stage; None for a graph that has no
            blocks, or not all layers of the model.
        again: ops of recomputed blocks, whose repetition the items contain.
        left: recomputation that `autopar.cost_model.step` still has to add, for layers all alike; "none"
            where the items contain all of it.
        selected: recomputed single ops, whose repetition the items contain; None where whole blocks are.
        slices: what blocks keep in slices, whose gathers the items contain.
    """

    blocks: Mapping[str, int] | None
    again: frozenset[str]
    left: Recompute
    selected: Selected | None = None
    slices: tuple[KeptSlice, ...] = ()

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> RecomputationPrice:
        """The blocks of a graph and those that a plan recomputes."""
        if not has_blocks(graph) or not is_whole(graph):
            return cls(None, frozenset(), plan.recompute)
        slices = SavedValues(graph, plan).slices
        if plan.pipeline is not None:
            return cls(parts_of_ops(graph, plan), frozenset(), plan.recompute, slices=slices)
        if isinstance(plan.recompute, Selection):
            chosen = selected(graph, plan, plan.recompute)
            return cls(parts_of_ops(graph, plan), frozenset(), "none", chosen, slices)
        again = ops_again(graph, plan) if plan.recompute != "none" else frozenset()
        return cls(parts_of_ops(graph, plan), again, "none", slices=slices)
