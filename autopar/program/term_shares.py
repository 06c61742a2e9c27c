"""Shares of the terms of a loss as inputs of a program.

    loss = add(a, b)    ->    loss = add(mul(a, share_of_a), mul(b, share_of_b))

See [Note: a loss of several terms] in autopar.analysis.objective. A share is a number of the micro-batch, the same on
every rank. A term may be a partial sum (P) or whole: to multiply it by a number goes with both.

A micro-batch may have no element that counts in one term, and some in another. The term is then 0 / 0 with a share of
0; what follows from it is left out, see `multiply_terms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.objective import Objective
from autopar.capture.captured import Captured
from autopar.errors import StepError
from autopar.ir import Plan
from autopar.ops.nodes import tensor_operands

aten = torch.ops.aten


# Ops that are linear in their first operand, between a quotient and where it is added.
_LINEAR = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default, aten._to_copy.default)
# Means over targets that are not ignored: of none their gradient is 0.
_MASKED_MEANS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)


def multiply_terms(
    module: fx.GraphModule, captured: Captured, objective: Objective
) -> tuple[Objective, list[tuple[str, torch.dtype]]]:
    """Multiplies the terms of a loss by placeholders, which it adds at the end.

    A term of 0 / 0 becomes 0 where its share is 0, and so do its gradients.

    Args:
        module: the graph of one rank, changed in place.
        captured: the step as captured for a micro-batch.
        objective: the objective of the step.

    Returns the objective, whose terms know whether they may be 0 / 0, and names and dtypes of the placeholders.
    """
    nodes = {node.name: node for node in captured.module.graph.nodes}
    # By origin: calls that a rule has added may have any name, such as that of another call of the capture.
    local = {origin: node for node in module.graph.nodes if (origin := _captured_call(node, nodes))}
    terms, shares = [], []
    for term in objective.terms:
        may_be_empty, share = _multiply(module.graph, local[term.user], nodes[term.user], term.name)
        terms.append(replace(term, may_be_empty=may_be_empty))
        shares.append(share)
    return replace(objective, terms=tuple(terms)), shares


def _captured_call(node: fx.Node, captured: Mapping[str, fx.Node]) -> str:
    """The name of the captured call that a local one is; "" for a conversion, or a part of another call."""
    origin: str = node.meta.get("origin", "")
    is_call = origin and "converts" not in node.meta and node.target == captured[origin].target
    return origin if is_call else ""


def _multiply(graph: fx.Graph, user: fx.Node, captured: fx.Node, name: str) -> tuple[bool, tuple[str, torch.dtype]]:
    """Multiplies an operand of a local call by a new placeholder; also whether the operand may be 0 / 0."""
    operands = tensor_operands(captured)
    place = [x.name for x in operands].index(name)
    term, dtype = (user.all_input_nodes[_distinct(operands, place)], operands[place].meta["val"].dtype)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        share = graph.placeholder(f"share_of_{name}_in_{user.name}")
    wide = torch.promote_types(dtype, torch.float32)
    emit, counted, quotient = _Emitter(graph, user), term, _quotient(term)
    if quotient is not None and quotient.target in _MASKED_MEANS:
        is_none = emit(aten.logical_and.default, emit(aten.isnan.default, term), emit(aten.eq.Scalar, share, 0))
        counted = emit(aten.masked_fill.Scalar, term, is_none, 0)
    elif quotient is not None:
        _divide_nothing_by_one(graph, quotient)
    product = emit(aten.mul.Tensor, counted, share)
    if wide != dtype:
        product = emit(aten._to_copy.default, product, dtype=dtype)
    user.replace_input_with(term, product)
    return quotient is not None, (share.name, wide)


def _quotient(term: fx.Node) -> fx.Node | None:
    """The division, or mean over targets, whose result a term is, but for constant factors."""
    while term.target in _LINEAR and len(term.all_input_nodes) == 1:
        (term,) = term.all_input_nodes
    is_division = term.target is aten.div.Tensor and len(term.all_input_nodes) == 2
    return term if is_division or term.target in _MASKED_MEANS else None


def _divide_nothing_by_one(graph: fx.Graph, quotient: fx.Node) -> None:
    """Lets a division divide 0 by 1 where it would by 0, so that it has a gradient of 0 there, in place of none.

    Another number divided by 0 stays infinite.
    """
    numerator, denominator = quotient.args
    emit = _Emitter(graph, quotient)
    is_none = emit(aten.logical_and.default, emit(aten.eq.Scalar, numerator, 0), emit(aten.eq.Scalar, denominator, 0))
    quotient.update_arg(1, emit(aten.add.Tensor, denominator, is_none))


class _Emitter:
    """Adds calls to a graph before a node, with the origin of that node."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            made = self._graph.call_function(op, args, kwargs)
        made.meta["origin"] = self._before.meta["origin"]
        return made


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
