"""Collectives next to products -> one call that sends piece by piece while it computes.

    g = all_gather(x, [1]); a = linear(g, v); b = linear(g, w)   ->   p = gather_products(x, (v, w)); a = p[0]; b = p[1]
    y = linear(x, w); z = reduce_scatter(y, [1])                 ->   z = product_scatter(x, w)

An all-gather is decomposed if linear layers alone read its result, and a reduce-scatter if it alone reads the result
of a linear layer. If between an all-gather and its linear layers stands the mark of a saved slice
(`autopar.ops.marks`) which is the operand of the all-gather, the call keeps this operand itself, and gathers again in
backward:

    g = all_gather(x, [2]); k = kept(g, "layers.0.a"); a = linear(k, v)   ->   p = gather_products(x, (v,), again=True)

A call keeps its place in the order of random numbers, since none of these ops draws any.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ops.collectives import Collective
from autopar.ops.marks import kept
from autopar.ops.nodes import draws

_LINEAR = torch.ops.aten.linear.default
Gathered = tuple[tuple[int, ...], str]  # the dims of an all-gather, and its group


def decompose_products(
    module: fx.GraphModule,
    gather_products: Callable[..., Any],
    product_scatter: Callable[..., Any],
    *,
    groups: Collection[str],
    restored: Mapping[str, Gathered] = MappingProxyType({}),
) -> None:
    """Decomposes the collectives over `groups` whose products can be computed in pieces.

    Args:
        module: graph of one rank, changed in place.
        gather_products, product_scatter: functions of a module's top level with the arguments of those in
            `autopar.ops.decomposed`.
        groups: names of mesh axes, or of process groups in a bound graph.
        restored: name of a saved slice from which one all-gather makes the saved tensor again -> its dims and group.
    """
    for node in list(module.graph.nodes):
        call = Collective.of(node)
        if call is None or call.group not in groups:
            continue
        if gathered := gathered_for_products(node, restored):
            _gather(module.graph, node, gathered, call, gather_products)
        elif product := scattered_product(node):
            _scatter(module.graph, node, call, product, product_scatter)
    module.recompile()


def gathered_for_products(node: fx.Node, restored: Mapping[str, Gathered] = MappingProxyType({})) -> fx.Node | None:
    """The node of an all-gather that only products read, or the mark of its saved slice; None if other ops read it too.

    Args:
        node: a node of the graph.
        restored: name of a saved slice from which one all-gather makes the saved tensor again -> its dims and group.
    """
    call = Collective.of(node)
    if call is None or (call.name, call.backward) != ("all_gather", "reduce_scatter"):
        return None
    marks = [user for user in node.users if user.target is kept]
    own = {"", *(name for name, found in restored.items() if found == (call.dims, call.group))}
    read = marks[0] if len(node.users) == 1 and marks and marks[0].args[1] in own else node
    alone = bool(read.users) and all(_multiplies(user, read, node) for user in read.users)
    return read if alone and _is_matrix(node) else None


def scattered_product(node: fx.Node) -> fx.Node | None:
    """The product whose rows a node adds up and scatters; None where it does not, or where others read the product."""
    call = Collective.of(node)
    if call is None or (call.name, call.backward) != ("reduce_scatter", "all_gather"):
        return None
    product = call.x
    alone = product.target is _LINEAR and len(product.users) == 1
    return product if alone and _is_alike(product, node) and _is_matrix(node) else None


def _multiplies(user: fx.Node, read: fx.Node, gathered: fx.Node) -> bool:
    """Whether a node is a linear layer of what is read of a gathered tensor, and has that as no other operand."""
    if user.target is not _LINEAR or user.args[0] is not read:
        return False
    return read not in _operands(user) and _is_alike(user, gathered)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether backward recomputes both nodes or none."""
    return bool(a.meta.get("recomputed", False)) == bool(b.meta.get("recomputed", False))


def _is_matrix(node: fx.Node) -> bool:
    """Whether the tensor of a conversion has rows besides its features."""
    return bool(node.meta.get("ndim", 0) > 1)


def _gather(graph: fx.Graph, node: fx.Node, read: fx.Node, call: Collective, target: Callable[..., Any]) -> None:
    position = {each: i for i, each in enumerate(graph.nodes)}
    products = sorted(read.users, key=position.__getitem__)
    operands = [_operands(product) for product in products]
    if not _bring_forward(graph, [x for pair in operands for x in pair if x], products):
        return
    weights, biases = zip(*operands, strict=True)
    with graph.inserting_before(products[0]):
        whole = graph.call_function(
            target, (call.x, weights, biases, call.dims[0], call.size, call.group, _slice(read) != "")
        )
        whole.meta = dict(products[0].meta)
        for number, product in enumerate(products):
            result = graph.call_function(operator.getitem, (whole, number))
            result.meta = dict(product.meta)
            product.replace_all_uses_with(result)
    for each in dict.fromkeys((*products, read, node)):
        graph.erase_node(each)


def _slice(read: fx.Node) -> str:
    """The name of the saved slice in a mark; "" for none."""
    return str(read.args[1]) if read.target is kept else ""


def _bring_forward(graph: fx.Graph, needed: Collection[fx.Node], products: Sequence[fx.Node]) -> bool:
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


def _scatter(graph: fx.Graph, node: fx.Node, call: Collective, product: fx.Node, target: Callable[..., Any]) -> None:
    weight, bias = _operands(product)
    with graph.inserting_before(node):
        new = graph.call_function(target, (product.args[0], weight, bias, call.dims[0], call.size, call.group))
    new.meta = dict(product.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(product)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Weight and bias of a linear layer."""
    _, weight, *bias = product.args
    return weight, (bias or [product.kwargs.get("bias")])[0]  # type: ignore[return-value]
