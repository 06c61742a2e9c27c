"""What the choices of a plan mean, as remarks beside its ops: the layouts of each, and what it takes of a step.

    op linear_1: b j      #  41.2 µs  S(0)@dp, S(0)@tp -> S(0)@dp S(1)@tp

The seconds are those of all executions in a step, forward and backward, with the conversions of the op's operands
(communication), before anything overlaps. The layouts are those of the operands, and, behind the arrow, of the results.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from autopar.cost_model.items import runs_every_time
from autopar.ir import Graph, Mesh, Op, Plan
from autopar.ir.layout import Layout, format_layout
from autopar.ir.op import operand_layouts, result_layouts
from autopar.pipeline.composed import Figures, step_of
from autopar.search.request.request import Request
from autopar.units import format_seconds


def with_remarks(plan: Plan, graph: Graph, request: Request) -> Plan:
    """The plan, which is priced when somebody prints it."""
    return replace(plan, remarks=functools.partial(remarks, graph, request))


def remarks(graph: Graph, request: Request, plan: Plan) -> dict[str, str]:
    """Op name -> its seconds in a step, its layouts and its module, for people; none for a plan of another graph."""
    if plan.ops.keys() != {op.name for op in graph.ops}:
        return {}
    found = op_seconds(graph, plan, **request.figures)
    shown = {op: format_seconds(seconds) for op, seconds in found.items()}
    wide = max(map(len, shown.values()), default=0)
    return {op.name: f"{shown.get(op.name, ''):>{wide}}  {op_layouts(op, plan)}  {op.module}" for op in graph.ops}


def op_seconds(graph: Graph, plan: Plan, **figures: Unpack[Figures]) -> dict[str, float]:
    """Op name -> seconds of a step that it computes, and that its operands are converted, before anything overlaps.

    Ops that take no time, such as views, are left out. Of pipeline stages all are counted.
    """
    step = step_of(graph, replace(plan, pipeline=None), **figures)
    found: dict[str, float] = defaultdict(float)
    for item in step.items:
        if item.of in plan.ops and runs_every_time(item) and item.seconds:
            times = float(step.run.micro_batches) * float(step.times(item)) * float(item.count)
            found[item.of] += times * float(item.seconds)
    return found


def op_layouts(op: Op, plan: Plan) -> str:
    """Layouts of an op's operands and results under a plan, such as `S(0)@dp, R -> S(0)@dp`."""
    labels = plan.ops[op.name]
    return f"{_text(operand_layouts(op, labels), plan.mesh)} -> {_text(result_layouts(op, labels), plan.mesh)}".strip()


def _text(layouts: Sequence[Layout], mesh: Mesh) -> str:
    return ", ".join(format_layout(layout, mesh) for layout in layouts)
