"""Shares of the terms of a loss as inputs of a program.

    loss = add(a, b)    ->    loss = add(mul(a, share_of_a), mul(b, share_of_b))

See [Note: a loss of several terms] in autopar.analysis.objective. A share is a number of the micro-batch, the same on
every rank. A term may be a partial sum (P) or whole: to multiply it by a number goes with both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.analysis.objective import LossTerm, Objective
from autopar.capture.captured import Captured
from autopar.errors import StepError
from autopar.ir import Plan
from autopar.ops.nodes import tensor_operands

aten = torch.ops.aten


def multiply_terms(
    module: fx.GraphModule, captured: Captured, terms: Sequence[LossTerm]
) -> list[tuple[str, torch.dtype]]:
    """Multiplies the terms of a loss by placeholders, which it adds at the end; returns their names and dtypes.

    Args:
        module: the graph of one rank, changed in place.
        captured: the step as captured for a micro-batch.
        terms: the terms of its loss.
    """
    local = {node.name: node for node in module.graph.nodes}
    nodes = {node.name: node for node in captured.module.graph.nodes}
    return [_multiply(module.graph, local[term.user], nodes[term.user], term.name) for term in terms]


def _multiply(graph: fx.Graph, user: fx.Node, captured: fx.Node, name: str) -> tuple[str, torch.dtype]:
    """Multiplies an operand of a local call by a new placeholder."""
    operands = tensor_operands(captured)
    place = [x.name for x in operands].index(name)
    term, dtype = (user.all_input_nodes[_distinct(operands, place)], operands[place].meta["val"].dtype)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        share = graph.placeholder(f"share_of_{name}_in_{user.name}")
    wide = torch.promote_types(dtype, torch.float32)
    with graph.inserting_before(user):
        product = graph.call_function(aten.mul.Tensor, (term, share))
        made = [product]
        if wide != dtype:
            made.append(graph.call_function(aten._to_copy.default, (product,), {"dtype": dtype}))
    for node in made:
        node.meta["origin"] = user.meta["origin"]
    user.replace_input_with(term, made[-1])
    return share.name, wide


def _distinct(operands: Sequence[fx.Node], place: int) -> int:
    """The place of an operand among the operands, each counted once."""
    return list(dict.fromkeys(operands)).index(operands[place])


def put_together(objective: Objective, plan: Plan) -> Objective:
    """The objective as a plan can carry it out: one that updates inside of the step knows no shares of terms."""
    if not objective.terms or plan.pipeline is None or not plan.pipeline.update_every:
        return objective
    obstacle = "its terms have different denominators, and parameters are updated inside of the step"
    return Objective("unknown", obstacle=obstacle)


def refuse_unknown(objective: Objective, micro_batches: int) -> None:
    """Raises StepError for a loss that several micro-batches do not give, but for [Note: batch statistics]."""
    if not objective.is_known and not objective.normalizes:
        raise StepError(
            f"{micro_batches} micro-batches would give another loss than the batch: {objective.obstacle}. Take "
            "micro_batches=1 (or leave it out), which gives the loss of the whole batch. If the mean over smaller "
            "batches is meant, give each of them to a step of its own, and divide the gradients by their number."
        )
