"""Skewed routing: experts that get more rows than others, as a property of a graph.

Of the ranks that exchange rows for their experts (`t>e`), one holds the fullest expert. A graph with a *skew* says that
this rank gets so many times the mean of the rows: it computes, sends and keeps so many times as much, and the others
wait for it. Layouts, results and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.ir.choice import EXCHANGED, Choice
from autopar.ir.graph import Graph
from autopar.ir.op import Op

EXPERTS = "autopar.analysis.experts"  # the kind of the op that stands for a mixture of experts

# Ends of the names of what such an op keeps of the rows' own rank: their orders before and after the exchange.
ORDERS = ("order", "back")


def with_skew(graph: Graph, skew: float) -> Graph:
    """The graph of a model whose fullest expert gets `skew` times as many rows as the mean.

    Experts that share its rank are taken to be as full. Raises AutoparError for a model without experts whose number of
    rows depends on the routing.
    """
    if skew == 1:
        return graph
    if not any(op.kind == EXPERTS for op in graph.ops):
        raise AutoparError(
            f"skew={skew:g} says how full an expert is, but no layer of this model sorts its rows by expert: it has no "
            "experts, or gives each a fixed number of rows (a capacity). Leave skew out."
        )
    experts = {name for name, factor in graph.factors.items() if "expert" in factor.roles}
    return replace(graph, ops=tuple(_skewed(op, experts, skew) if op.kind == EXPERTS else op for op in graph.ops))


def _skewed(op: Op, experts: Container[str], skew: float) -> Op:
    choices = (_uneven(each, op, skew) if each.factor in experts else each for each in op.choices)
    collectives = (replace(each, stretch=skew) if each.leaves else each for each in op.collectives)
    return replace(op, choices=tuple(choices), collectives=tuple(collectives))


def _uneven(choice: Choice, op: Op, skew: float) -> Choice:
    """The choice with the work, and the exchanged rows that it keeps, of the rank that has the fullest expert."""
    if EXCHANGED not in choice.label:
        return replace(choice, stretch=skew)
    seen = len(op.results) - len(op.hidden)
    kept = (
        x if x.kind != "S" or name.endswith(ORDERS) else x._replace(stretch=skew)
        for name, x in zip(op.hidden, choice.results[seen:], strict=True)
    )
    return replace(choice, results=(*choice.results[:seen], *kept), stretch=skew)
