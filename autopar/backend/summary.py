"""The line about a graph of torch.compile: what is split and what is not, and the inserted collectives."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.ir import Graph, Plan
from autopar.ops.collectives import Collective
from autopar.ops.ring import Ring
from autopar.search.request.recipes import is_open


def summary(graph: Graph, plan: Plan, local: fx.GraphModule) -> str:
    """What is split of a graph, and where nothing is, that every rank computes all of it, and what would split it.

    `graph of 31 ops on dp=2,tp=2 (recipe auto): dp splits batch in 30 ops; tp splits ...; 1 op runs whole on every
    rank; collectives inserted: 4 all_reduce, 2 shard`
    """
    head = f"graph of {len(graph.ops)} ops on {plan.mesh} (recipe {plan.recipe})"
    split = [op for op in graph.ops if any(op.choice(label).splits for label in plan.ops[op.name])]
    if not split:
        return f"{head}: {_nothing(plan)}"
    axes = [f"{axis} splits {_what_splits(graph, plan, i)}" for i, axis in enumerate(plan.mesh.names)]
    whole = len(graph.ops) - len(split)
    rest = [f"{whole} {'op runs' if whole == 1 else 'ops run'} whole on every rank"] if whole else []
    calls = [call for node in local.graph.nodes if (call := Collective.of(node) or Ring.of(node))]
    moved = Counter(call.name for call in calls if call.name != "vary")
    inserted = ", ".join(f"{count} {name}" for name, count in sorted(moved.items())) or "none"
    return f"{head}: {'; '.join([*axes, *rest])}; collectives inserted: {inserted}"


def _nothing(plan: Plan) -> str:
    if plan.mesh.size == 1:
        return "nothing is split, as there is one rank; start the script with torchrun --nproc-per-node 2"
    words = f"nothing is split: each of the {plan.mesh.size} ranks computes all of it, as one process would"
    if is_open(plan.recipe):
        words += ", because that was found fastest; options={'recipe': 'ddp'} insists on a split of the batch"
    return words


def _what_splits(graph: Graph, plan: Plan, axis: int) -> str:
    chosen = [op.choice(plan.ops[op.name][axis]) for op in graph.ops]
    counts = Counter(choice.factor for choice in chosen if choice.splits)
    if not counts:
        return "nothing"
    shown = [f"{factor} in {count} ops" for factor, count in counts.most_common(4)]
    return ", ".join(shown) + (", ..." if len(counts) > 4 else "")
