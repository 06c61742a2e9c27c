"""gated(x, w) -> mul(silu(x), w), where `gated` has no rule and all of its parts have one.

An op without a rule runs whole on every rank. Some have a decomposition: a function of a library that is registered as
made of other ops, and ops for which torch has one. Where every part has a rule, the parts stand in the graph instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload, decomposition_of, schema, traced_ops
from autopar.ops.nodes import draws, tensor_operands
from autopar.rules import find_rule
from autopar.rules.proofs import decomposes


def open_unruled(module: fx.GraphModule) -> None:
    """Replaces every op without a rule by its parts, if all of them have rules and together give the op's results."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if find_rule(node) is None and not draws(node) and not schema(node.target).is_mutable:
            parts = _parts(node)
            if parts is not None:
                _put(node, parts)
    module.recompile()


def _parts(node: fx.Node) -> fx.Graph | None:
    """The graph of an op's parts; None if it has none, or one that has no rule, or they give something else."""
    decomposition = decomposition_of(node.target)
    operands = tensor_operands(node)
    if decomposition is None or not operands:
        return None
    values = [x.meta["val"] for x in operands]
    call = _function(node, decomposition)
    try:
        with values[0].fake_mode, torch.no_grad():
            parts = traced_ops(call, values)
    except Exception:  # a decomposition that reads values, or does not take these
        return None
    calls = [x for x in parts.nodes if x.op == "call_function" and x.target is not operator.getitem]
    known = all(x.op in ("placeholder", "call_function", "output") for x in parts.nodes)
    if not known or not all(map(_has_rule, calls)) or any(x.target is node.target for x in calls):
        return None
    return parts if decomposes(node, call) else None


def _has_rule(part: fx.Node) -> bool:
    target = part.target
    is_op = isinstance(target, OpOverload) and not schema(target).is_mutable
    return is_op and not draws(part) and find_rule(part) is not None


def _function(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the node's op, or of its decomposition, as a function of its tensor operands."""

    def call(*operands: torch.Tensor) -> Any:
        remaining = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))
        return target(*args, **kwargs)

    return call


def _put(node: fx.Node, parts: fx.Graph) -> None:
    """Writes the parts in the place of an op."""
    known = dict(zip(parts.find_nodes(op="placeholder"), tensor_operands(node), strict=True))
    with node.graph.inserting_before(node):
        for part in parts.nodes:
            if part.op == "call_function":
                known[part] = node.graph.node_copy(part, known.__getitem__)
                known[part].meta = {**node.meta, "val": part.meta["val"]}
    (output,) = parts.find_nodes(op="output")
    results = output.args[0]
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(known[results])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(known[results[user.args[1]]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
