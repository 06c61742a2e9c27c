"""The log line of a graph of torch.compile: the split factors and the inserted collectives."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.ir import Graph, Plan
from autopar.ops.collectives import Collective
from autopar.ops.ring import Ring


def summary(graph: Graph, plan: Plan, local: fx.GraphModule) -> str:
    """`graph of 31 ops on dp=2,tp=2: dp splits batch in 30; tp splits ...; 4 all_reduce, 2 shard`."""
    splits = [f"{axis} splits {_what_splits(graph, plan, i)}" for i, axis in enumerate(plan.mesh.names)]
    calls = [call for node in local.graph.nodes if (call := Collective.of(node) or Ring.of(node))]
    moved = Counter(call.name for call in calls if call.name != "vary")
    inserted = ", ".join(f"{count} {name}" for name, count in sorted(moved.items())) or "none"
    return (
        f"graph of {len(graph.ops)} ops on {plan.mesh} (recipe {plan.recipe}): {'; '.join(splits)}; "
        f"collectives inserted: {inserted}"
    )


def _what_splits(graph: Graph, plan: Plan, axis: int) -> str:
    chosen = [op.choice(plan.ops[op.name][axis]) for op in graph.ops]
    counts = Counter(choice.factor for choice in chosen if choice.splits)
    if not counts:
        return "nothing"
    shown = [f"{factor} in {count} ops" for factor, count in counts.most_common(4)]
    return ", ".join(shown) + (", ..." if len(counts) > 4 else "")
