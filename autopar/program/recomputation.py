"""Marks the calls of a program with their block, and with whether backward recomputes them.

A plan names whole blocks (the first ones of every stage), or ops of every block (`autopar.ir.recompute`).
`autopar.pipeline.blocks` finds the blocks, and `autopar.pipeline.recomputable` gives ops their names. The search uses
the same functions, so that it prices what runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.errors import PlanError
from autopar.ir import Graph, Plan
from autopar.ir.recompute import Recompute, Selection, path_pattern
from autopar.passes.cut_stages import stage_numbers
from autopar.pipeline.blocks import has_blocks
from autopar.pipeline.parts import repeating_parts
from autopar.pipeline.producers import recomputable_names, recomputed_producers
from autopar.rules.random import is_key


def mark_blocks(module: fx.GraphModule, graph: Graph, plan: Plan) -> frozenset[int]:
    """Marks every call of a program with its block and with whether backward recomputes it.

    Writes the index of the block into `meta["block"]`, and a bool into `meta["recomputed"]`. Returns the blocks of
    which something is recomputed. Blocks are numbered in the order of `repeating_parts`: one that is cut by the
    plan counts as two. A tile of a loss (`autopar.rules.linear_loss`) is a block inside of another, and recomputed.
    """
    parts, blocks = repeating_parts(graph, plan) if has_blocks(graph) else ((), frozenset())
    chosen = None
    if isinstance(plan.recompute, Selection):
        chosen = recomputed_producers(graph, plan, plan.recompute)
    places = {op.name: i for i, op in enumerate(graph.ops)}
    begins = [places[part.start] for part in parts[1:]]
    numbers = stage_numbers(module, places, begins)
    moments = _moments(numbers)
    room = max(moments.values(), default=0) + 1
    for node, number in numbers.items():
        producer = node.meta["origin"], node.meta.get("converts", "")
        node.meta["block"] = number * room + moments[node]
        node.meta["recomputed"] = _is_of_tile(node) or (
            number in blocks and not is_key(node) and (chosen is None or chosen.get(producer, False))
        )
    return frozenset(n.meta["block"] for n, number in numbers.items() if number in blocks or _is_of_tile(n))


def _is_of_tile(node: fx.Node) -> bool:
    return "tile" in node.meta


def _moments(numbers: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The order of the calls of a block: an odd number for each tile, an even one for what is between them."""
    found: dict[fx.Node, int] = {}
    tiles: dict[tuple[str, int], int] = {}
    for node, number in numbers.items():
        if _is_of_tile(node):
            found[node] = tiles.setdefault((node.meta["origin"], node.meta["tile"]), 2 * len(tiles) + 1)
        else:
            before = (found[n] for n in node.all_input_nodes if numbers.get(n) == number)
            latest = max(before, default=0)
            found[node] = latest + latest % 2
    return found


def check_selection(plan: Plan, selection: Selection, graph: Graph) -> None:
    """Raises PlanError for a block, or an op of one, that the model does not have."""
    known = recomputable_names(graph, plan)
    for path, names in selection.blocks:
        there = [own for block, own in known.items() if path in (block, path_pattern(block))]
        unknown = [name for name in names if not any(name in own for own in there)]
        if not there or unknown:
            what = f"op {unknown[0]!r} of the block {path!r}" if there else f"block {path!r}"
            some = ", ".join(list(there[0] if there else known)[:3]) or "none"
            raise PlanError(f"The plan recomputes the {what}, which the model does not have. It has {some}, ...")


def known_recomputation(plan: Plan, graph: Graph) -> Recompute:
    """The recomputation of a plan, without ops that this graph of the same model does not have.

    A forward runs no loss, and in evaluation no dropout.
    """
    if not isinstance(plan.recompute, Selection):
        return plan.recompute
    known: dict[str, set[str]] = {}
    for path, names in recomputable_names(graph, plan).items():
        for each in (path, path_pattern(path)):
            known.setdefault(each, set()).update(names)
    found = [
        (path, tuple(name for name in names if name in known[path]))
        for path, names in plan.recompute.blocks
        if path in known
    ]
    return Selection(tuple(found)) if any(names for _, names in found) else "none"
