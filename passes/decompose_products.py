"""Collectives next to products -> one call that sends piece by piece while it computes.

    g = all_gather(x, [1]); a = linear(g, v); b = linear(g, w)   ->   p = gather_products(x, (v, w)); a = p[0]; b = p[1]
    y = linear(x, w); z = reduce_scatter(y, [1])                 ->   z = product_scatter(x, w)

An all-gather is decomposed if linear layers alone read its result, and a reduce-scatter if it alone reads the result
of a linear layer; neither along the features. A call keeps its place in the order of random numbers, since none of
these ops draws any.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ops.collectives import Collective
from autopar.ops.nodes import draws

_LINEAR = torch.ops.aten.linear.default


def decompose_products(
    module: fx.GraphModule,
    gather_products: Callable[..., Any],
    product_scatter: Callable[..., Any],
    *,
    groups: Collection[str],
) -> None:
    """Decomposes the collectives over `groups` whose products can be computed in pieces.

    Args:
        module: graph of one rank, changed in place.
        gather_products, product_scatter: functions of a module's top level with the arguments of those in
            `autopar.ops.decomposed`.
        groups: names of mesh axes, or of process groups in a bound graph.
    """
    for node in list(module.graph.nodes):
        call = Collective.of(node)
        if call is None or call.group not in groups:
            continue
        if gathers_for_products(node):
            _gather(module.graph, node, call, gather_products)
        elif product := scattered_product(node):
            _scatter(module.graph, node, call, product, product_scatter)
    module.recompile()


def gathers_for_products(node: fx.Node) -> bool:
    """Whether a node gathers the rows of products, and nothing else reads them."""
    call = Collective.of(node)
    if call is None or (call.name, call.backward) != ("all_gather", "reduce_scatter"):
        return False
    return (
        bool(node.users) and _has_rows(node) and all(_multiplies(user, node) for user in node.users)
    )


def scattered_product(node: fx.Node) -> fx.Node | None:
    """The product whose rows a node adds up and scatters; None where it does not, or where others read the product."""
    call = Collective.of(node)
    if call is None or (call.name, call.backward) != ("reduce_scatter", "all_gather"):
        return None
    product = call.x
    alone = product.target is _LINEAR and len(product.users) == 1
    return product if alone and _is_alike(product, node) and _has_rows(node) else None


def _multiplies(user: fx.Node, gathered: fx.Node) -> bool:
    """Whether a node is a linear layer of the gathered rows that shares no other operand with them."""
    if user.target is not _LINEAR or user.args[0] is not gathered:
        return False
    return gathered not in _operands(user) and _is_alike(user, gathered)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether backward recomputes both nodes or none."""
    return bool(a.meta.get("recomputed", False)) == bool(b.meta.get("recomputed", False))


def _has_rows(node: fx.Node) -> bool:
    """Whether a conversion's collective runs along another dim than the last one, which has the features."""
    call = Collective.of(node)
    return call is not None and call.dims[0] < node.meta.get("ndim", 0) - 1


def _gather(graph: fx.Graph, node: fx.Node, call: Collective, target: Callable[..., Any]) -> None:
    position = {each: i for i, each in enumerate(graph.nodes)}
    products = sorted(node.users, key=position.__getitem__)
    operands = [_operands(product) for product in products]
    if not _bring_forward(graph, [x for pair in operands for x in pair if x], products):
        return
    weights, biases = zip(*operands, strict=True)
    with graph.inserting_before(products[0]):
        whole = graph.call_function(
            target, (call.x, weights, biases, call.dims[0], call.size, call.group)
        )
        whole.meta = dict(products[0].meta)
        for number, product in enumerate(products):
            result = graph.call_function(operator.getitem, (whole, number))
            result.meta = dict(product.meta)
            product.replace_all_uses_with(result)
    for each in (*products, node):
        graph.erase_node(each)


def _bring_forward(
    graph: fx.Graph, needed: Collection[fx.Node], products: Sequence[fx.Node]
) -> bool:
    """Moves what makes some operands in front of the first product; False, and no move, if it depends on a product."""
    wanted, moved, is_behind = set(needed), [], False
    before = products[0]
    for each in reversed(list(graph.nodes)):
        if each is before:
            is_behind = True
        if each in wanted and not is_behind:
            moved.append(each)
            wanted.update(each.all_input_nodes)
    if not wanted.isdisjoint(products) or any(map(draws, moved)):
        return False
    for each in reversed(moved):
        before.prepend(each)
    return True


def _scatter(
    graph: fx.Graph, node: fx.Node, call: Collective, product: fx.Node, target: Callable[..., Any]
) -> None:
    weight, bias = _operands(product)
    with graph.inserting_before(node):
        new = graph.call_function(
            target, (product.args[0], weight, bias, call.dims[0], call.size, call.group)
        )
    new.meta = dict(product.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(product)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Weight and bias of a linear layer."""
    _, weight, *bias = product.args
    return weight, (bias or [product.kwargs.get("bias")])[0]  # type: ignore[return-value]
