"""The cost of ops without a rule. autopar does not know how to split them, so that every rank runs them whole."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.collectives import conversion_seconds
from autopar.cost_model.compute import op_seconds
from autopar.cost_model.flow import Flow
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.sizes import Sizes
from autopar.ir import Graph, Plan


@dataclass(frozen=True)
class Unruled:
    """The ops of one kind that have no rule.

    Attributes:
        kind: name of the operator, such as `aten.histc`.
        count: number of calls in the model.
        seconds: duration of these calls in a step, forward and backward: reading operands, writing results, and the
            conversions that gather the operands. This is a guess: the arithmetic of such an op is not known.
        gathered_bytes: bytes of the operands that a rank receives in the forward of a step.
    """

    kind: str
    count: int
    seconds: float
    gathered_bytes: int


def unruled(graph: Graph, plan: Plan, hardware: Hardware) -> tuple[Unruled, ...]:
    """The ops without a rule, by kind in alphabetical order.

    The cost of a conversion is attributed to every op that needs it.
    """
    sizes, flow = Sizes(plan.mesh), Flow(graph, plan)
    found: dict[str, Unruled] = {}
    for op in graph.ops:
        if op.has_rule or not op.operands:
            continue
        seconds = op_seconds(op, plan.ops[op.name], graph.tensors, sizes=sizes, hardware=hardware).total
        gathered = 0
        for name, layout in zip(op.operands, flow.operands[op.name], strict=True):
            tensor, source = graph.tensors[name], flow.produced[name]
            seconds += conversion_seconds(tensor, source, layout, sizes=sizes, hardware=hardware).total
            gathered += max(0, sizes.bytes(tensor, layout) - sizes.bytes(tensor, source))
        count = graph.layer_count.get(op.name, 1)
        times = plan.micro_batches * count
        before = found.get(op.kind, Unruled(op.kind, 0, 0.0, 0))
        found[op.kind] = Unruled(
            op.kind, before.count + count, before.seconds + times * seconds, before.gathered_bytes + times * gathered
        )
    return tuple(found[kind] for kind in sorted(found))
