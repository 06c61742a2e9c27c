"""The contents of a report as plain values: views read a `Page`, and need no search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy

from autopar.cost_model.breakdown import Breakdown, Candidate, Event
from autopar.pipeline.simulation import Simulation

NO_AXES = ("compute", "hidden")  # lanes of events that are not a mesh axis


class RooflinePoint(NamedTuple):
    """An op under the roofline.

    Attributes:
        name: name such as `mlp.up linear`.
        flops_per_byte: floating-point operations per byte of device memory traffic.
        flops_per_second: predicted rate.
        seconds: time of the op in a step, shown as the area of its dot.
    """

    name: str
    flops_per_byte: float
    flops_per_second: float
    seconds: float


class BlockCollective(NamedTuple):
    """A collective on the way into an op.

    Attributes:
        axis: mesh axis along which the collective runs.
        name: name such as `all_gather`.
        bytes: bytes sent by one rank.
        seconds: duration of the collective.
        operand: the operand of the op that it converts; "" where it belongs to no single one.
    """

    axis: str
    name: str
    bytes: float
    seconds: float
    operand: str = ""


class BlockNode(NamedTuple):
    """An op of the repeated block as the plan runs it, or several small ops of one module that are drawn as one.

    Attributes:
        name: name of the node, unique in the block.
        kind: name of the operator, such as `linear`, or of several, such as `mul, add`; nodes of the kinds "input",
            "parameter" and "output" are drawn as pills.
        module: path of its module, such as `layers.1.mlp`.
        layouts: (mesh axis, name of the dim that is split over it) pairs, such as `("tp", "heads")`.
        seconds: duration of the forward, without collectives.
        operands: names of the tensors that it reads; an edge is drawn from each that is a node of the block.
        collectives: collectives that its operands pass in the forward, in the order in which they run.
    """

    name: str
    kind: str
    module: str = ""
    layouts: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    operands: tuple[str, ...] = ()
    collectives: tuple[BlockCollective, ...] = ()


class StageRow(NamedTuple):
    """A stage of the pipeline; seconds and bytes are of one micro-batch on one rank of its mesh.

    Attributes:
        number: position of the stage in the model's order.
        rank: the pipeline rank that runs it.
        first, last: paths of the layers, or modules, that it begins and ends with.
        layers: how many layers of stacks it has.
        parameters: elements of those that it uses, in all ranks of its mesh together.
        forward_seconds, backward_seconds: on the rank.
        send_seconds, gradient_seconds: duration of its messages to the next stage and to the previous one.
        in_flight: largest number of micro-batches whose activations it holds at once.
        saved_bytes: saved activations of one micro-batch.
        kept_bytes: parameters, gradients, optimizer states and buffers.
        rank_bytes: peak memory of its rank, with all stages that the rank runs.
    """

    number: int
    rank: int
    first: str
    last: str
    layers: int
    parameters: int
    forward_seconds: float
    backward_seconds: float
    send_seconds: float
    gradient_seconds: float
    in_flight: int
    saved_bytes: float
    kept_bytes: float
    rank_bytes: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def where(self) -> str:
        """`layers.0 to layers.5`."""
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


class BatchRow(NamedTuple):
    """A batch that was tried for a step, with its fastest plan.

    Attributes:
        batch: number of samples of a step.
        step_seconds: duration of a step.
        samples_per_second: samples of all ranks together.
        tokens_per_second: tokens of all ranks together; None where the model has none.
        memory_bytes: peak memory of a rank.
        plan: the plan in words.
        is_searched: whether the plan was searched; otherwise its price is that of the closed form.
        is_chosen: whether it is the batch of the report.
        is_fastest: whether no other batch takes less time per sample.
        is_largest: whether it is the largest that fits in as few micro-batches as the request allows.
    """

    batch: int
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    memory_bytes: float
    plan: str
    is_searched: bool
    is_chosen: bool
    is_fastest: bool
    is_largest: bool


class Formula(NamedTuple):
    """A formula with its value in words, such as ("step time", t, "7.14 s")."""

    name: str
    expression: sympy.Expr
    value: str


@dataclass(frozen=True)
class Page:
    """A report. A section whose data are empty is left out.

    Attributes:
        title: what was planned.
        subtitle: cluster and run in words.
        figures: (label, value) pairs of the headline.
        memory: peak memory of a rank, by kind.
        memory_bound_bytes: what a rank may use.
        time: duration of a step, by part.
        traffic: bytes sent by a rank in a step.
        events: the predicted step on one rank, in any order; with stages by the closed form, in which all are alike.
        trace: the predicted step as a trace has it; with stages on all ranks.
        simulation: the step of all pipeline ranks, action by action; None without stages.
        stages: one row for every pipeline stage.
        candidates: ways to run the model, among them the chosen one.
        batches: batches that were tried for a step; none where the user names the batch.
        roofline: one point for every op.
        peak_flops: peak rate of the device in FLOP/s, the flat part of the roof.
        memory_bytes_per_second: memory bandwidth of the device, the slope of the roof.
        block: ops of the repeated block in topological order.
        formulas: formulas to typeset.
        sensitivity: name -> relative change of the step time when it grows by 1 %.
        notes: sentences.
        asked: (what, value) pairs of the question that the report answers.
        launch: lines that launch the plan.
        document: everything above as JSON, with units in the keys.
    """

    title: str
    subtitle: str
    figures: tuple[tuple[str, str], ...]
    memory: Breakdown
    memory_bound_bytes: float
    time: Breakdown
    traffic: Breakdown
    events: tuple[Event, ...] = ()
    trace: tuple[Event, ...] = ()
    simulation: Simulation | None = None
    stages: tuple[StageRow, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    batches: tuple[BatchRow, ...] = ()
    roofline: tuple[RooflinePoint, ...] = ()
    peak_flops: float = 0.0
    memory_bytes_per_second: float = 0.0
    block: tuple[BlockNode, ...] = ()
    formulas: tuple[Formula, ...] = ()
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    launch: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that communicate, in order of appearance."""
        lanes = (event.lane for event in self.events if event.lane not in NO_AXES)
        in_block = (axis for node in self.block for axis, _ in node.layouts)
        moved = (each.axis for node in self.block for each in node.collectives)
        return tuple(dict.fromkeys((*in_block, *moved, *lanes)))
