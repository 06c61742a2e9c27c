"""Gradients by rows: chooses, for each gradient that goes to one owner, whether only its nonzero rows are sent.

The price decides ([Note: by rows] in autopar/ir/conversion.py). In practice tables of embeddings are sent by rows, if a
rank looks up few of their rows between two reductions.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from autopar.cost_model.nodes import NodePricer
from autopar.ir import Graph, ParameterPlan, Plan, can_go_by_rows
from autopar.ir.note import Note
from autopar.units import format_bytes


def with_rows(plan: Plan, nodes: NodePricer, fixed: Container[str]) -> Plan:
    """The plan with each gradient sent to its owner whole, or by rows where that is shorter and takes fewer seconds.

    Args:
        plan: plan whose parameters have their owners.
        nodes: prices of the nodes of the plan's graph.
        fixed: parameters that stay as they are, because they are placed already.
    """
    graph = nodes.graph
    return replace(
        plan,
        parameters={
            name: how if name in fixed or not _can(graph, plan, name) else _cheaper(name, how, nodes)
            for name, how in plan.parameters.items()
        },
    )


def _messages_bytes(name: str, how: ParameterPlan, nodes: NodePricer) -> tuple[float, float]:
    """Bytes that a rank sends of a gradient to its owner by rows, at most, and whole."""
    by_rows, whole = (
        sum(map(float, nodes.messages_to_owner(name, replace(how, by_rows=each)))) for each in (True, False)
    )
    return by_rows, whole


def _can(graph: Graph, plan: Plan, name: str) -> bool:
    tensor, how = graph.tensors[graph.parameters[name]], plan.parameters[name]
    return tensor.needs_grad and can_go_by_rows(tensor.dims, how.storage, how.resident, plan.mesh)


def _cheaper(name: str, how: ParameterPlan, nodes: NodePricer) -> ParameterPlan:
    def seconds(given: ParameterPlan) -> float:
        return sum(float(i.seconds) for i in nodes.between_steps(name, given) if i.phase == "reduce")

    by_rows, whole = _messages_bytes(name, how, nodes)  # with all rows the indices come on top
    ways = (False, True) if by_rows < whole else (False,)
    return min((replace(how, by_rows=rows) for rows in ways), key=seconds)


def row_notes(plan: Plan, nodes: NodePricer) -> tuple[Note, ...]:
    """A sentence for each gradient that is sent by rows, and for each table that is not because of another use."""
    return tuple(Note(text, "owners") for text in _sentences(plan, nodes))


def _sentences(plan: Plan, nodes: NodePricer) -> Iterator[str]:
    graph = nodes.graph
    looked_up = {op.operands[0] for op in graph.ops if op.looks_up is not None}
    for name, how in plan.parameters.items():
        tensor = graph.parameters[name]
        if how.by_rows:
            rows, whole = _messages_bytes(name, how, nodes)
            yield (
                f"the gradient of {name} is sent to its owner by rows: at most {format_bytes(rows)} per rank instead "
                f"of {format_bytes(whole)}"
            )
        elif tensor in looked_up - graph.lookups.keys() and _can(graph, plan, name):
            yield (
                f"the gradient of {name} is sent to its owner whole: ops other than lookups use the parameter, so "
                "every row has a gradient"
            )
