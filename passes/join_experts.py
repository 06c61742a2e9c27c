"""sort by expert, grouped products, back in order -> one call of `autopar.analysis.experts.Experts`.

    order = sort(ids)[1]; x = rows[order // k]; y = grouped(x, weights, ends of the sorted ids)
    z = y[inverse of order]                        ->   z = experts(rows, ids, weights)

Models compute the order, the ends and the inverse in many ways, but always from the ids alone. This pass therefore
runs these computations on random ids, and joins a layer if the results are a sort, its ends and its inverse.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.analysis.experts import Experts
from autopar.ops.nodes import call_like, reached, tensor_operands
from autopar.rules import operator_name
from autopar.rules.grouped import PRODUCTS

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)


def join_experts(module: fx.GraphModule) -> None:
    """Joins every mixture of experts; one that is written in another way is left as it is."""
    for node in list(module.graph.nodes):
        if node.target in _SORTS and _sorts_ids(node) and (layer := _find(node)):
            _replace(module.graph, layer)
    module.graph.eliminate_dead_code()
    module.recompile()


@dataclass(frozen=True)
class _Layer:
    """The nodes of a mixture of experts, from the sort of ids to the lookup that restores the order of rows.

    Attributes:
        ids: node of the expert ids, which are sorted.
        count: number of experts.
        entries: lookup of rows in the sorted order -> number of ids of each row.
        body: calls on sorted rows.
        routing: node that the body uses and that depends only on the ids -> "ordered" (sorted ids) or "ends".
        exit: the lookup that restores the order of rows.
    """

    ids: fx.Node
    count: int
    entries: dict[fx.Node, int]
    body: list[fx.Node]
    routing: dict[fx.Node, str]
    exit: fx.Node


def _sorts_ids(node: fx.Node) -> bool:
    value = tensor_operands(node)[0].meta["val"]
    return value.ndim == 1 and not value.is_floating_point() and value.numel() > 0


def _find(sort: fx.Node) -> _Layer | None:
    after = _after(sort)
    products = [n for n in after if operator_name(n) in PRODUCTS]
    counts = {n.args[1].meta["val"].shape[0] for n in products if n.args[1] not in after}  # type: ignore[union-attr]
    if len(counts) != 1 or any(n.args[1] in after or n.args[0] not in after for n in products):
        return None
    (count,) = counts
    values = _routing(sort, after, count)
    lookups = [n for n in after if n not in values and _index(n) in values]
    exits = [n for n in lookups if n.args[0] in after]
    if len(exits) != 1:
        return None
    body = [n for n in _before(exits[0]) if n in after and n not in values]
    if any(user not in body and user is not exits[0] for n in body for user in n.users):
        return None
    return _checked(sort, count, values, body, exits[0])


def _checked(
    sort: fx.Node, count: int, values: dict[fx.Node, Tensor], body: list[fx.Node], last: fx.Node
) -> _Layer | None:
    """The layer, if the values for random ids are a sorting order, its ends and its inverse; else None."""
    ids = tensor_operands(sort)[0]
    drawn = values.pop(ids)
    ordered = drawn.sort().values
    order = next((v for v in values.values() if _is_order(v, drawn, ordered)), None)
    back = _index(last)
    assert back is not None
    if order is None or not _same(order[values[back]], torch.arange(len(drawn))):
        return None
    entries = _entries(body, values, order, ordered)
    rest = [n for n in body if n not in entries]
    routing = _used(rest, values, ordered, count)
    if None in entries.values() or None in routing.values() or "ends" not in routing.values():
        return None
    slots = {node: found for node, found in entries.items() if found is not None}
    kinds = {node: kind for node, kind in routing.items() if kind is not None}
    return _Layer(ids, count, slots, rest, kinds, last)


def _entries(
    body: list[fx.Node], values: dict[fx.Node, Tensor], order: Tensor, ordered: Tensor
) -> dict[fx.Node, int | None]:
    """Lookups of rows -> how many ids each row has; None where it is not the rows' order that is looked up."""
    found: dict[fx.Node, int | None] = {}
    for node in body:
        where = _index(node)
        if where is None or where not in values or node.args[0] in body:
            continue
        if _same(values[where], ordered):  # weights of every row's expert, such as its bias
            continue
        slots = len(order) // tensor_operands(node)[0].meta["val"].shape[0]
        found[node] = slots if slots and _same(values[where], order // slots) else None
    return found


def _used(body: list[fx.Node], values: dict[fx.Node, Tensor], ordered: Tensor, count: int) -> dict[fx.Node, str | None]:
    """Routing value that the body uses -> "ordered" for sorted ids, "ends", or None for anything else."""
    ends = torch.searchsorted(ordered, torch.arange(count), right=True)
    used = [n for call in body for n in tensor_operands(call) if n in values]
    return {n: "ordered" if _same(values[n], ordered) else "ends" if _same(values[n], ends) else None for n in used}


def _is_order(value: object, drawn: Tensor, ordered: Tensor) -> bool:
    """Whether a value is a permutation that sorts what was drawn."""
    if not isinstance(value, Tensor) or value.shape != drawn.shape or value.is_floating_point():
        return False
    within = bool(((value >= 0) & (value < len(drawn))).all())
    return within and _same(drawn[value], ordered) and len(torch.unique(value)) == len(value)


def _same(value: Tensor, wanted: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == wanted.shape and bool((value == wanted).all())


def _after(node: fx.Node) -> dict[fx.Node, None]:
    """The node and all nodes that depend on it, in the graph's order."""
    found = {node: None}
    here = node.next
    while here.op != "output":
        if any(n in found for n in here.all_input_nodes):
            found[here] = None
        here = here.next
    return found


def _before(node: fx.Node) -> list[fx.Node]:
    """The nodes on which a node depends, in the graph's order."""
    found = reached(node.all_input_nodes, lambda here: here.all_input_nodes)
    return [n for n in node.graph.nodes if n in found]


def _index(node: fx.Node) -> fx.Node | None:
    """The index tensor of a lookup along the first dim; None for any other node."""
    if node.target is not aten.index.Tensor:
        return None
    indices = list(node.args[1])  # type: ignore[arg-type]
    return indices[0] if len(indices) == 1 else None


def _routing(sort: fx.Node, after: Collection[fx.Node], count: int) -> dict[fx.Node, Tensor]:
    """Node that depends only on the ids -> its value for random ids of `count` experts."""
    ids = tensor_operands(sort)[0]
    example = ids.meta["val"]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, example.shape, generator=generator).to(example.dtype)
    values: dict[fx.Node, Tensor] = {ids: drawn}
    for node in after:
        free = [n for n in node.all_input_nodes if n not in values]
        if all(n.op == "call_function" and not n.all_input_nodes for n in free):
            for producer in free:
                values[producer] = _run(producer, values)
            values[node] = _run(node, values)
    return values


def _run(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    assert callable(node.target), node.target
    if node.target is not aten.histc.default:
        return node.target(*args, **kwargs)
    # A graph that is traced for a GPU or without a device counts integers, which the CPU does not.
    x, *bins = cast(tuple[Any, ...], args)
    found: Tensor = aten.histc.default(x.double(), *bins, **kwargs)
    return found.to(x.dtype)


def _replace(graph: fx.Graph, layer: _Layer) -> None:
    inside = {*layer.body, *layer.entries, *layer.routing}
    weights = list(dict.fromkeys(n for call in layer.body for n in tensor_operands(call) if n not in inside))
    target = Experts(_body(layer, weights), tuple(layer.entries.values()), layer.count)
    operands = [*(entry.args[0] for entry in layer.entries), layer.ids, *weights]
    with graph.inserting_before(layer.exit):
        new = call_like(graph, layer.exit, target, *operands)
    layer.exit.replace_all_uses_with(new)


def _body(layer: _Layer, weights: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def take(name: str, sources: list[fx.Node], like: Tensor) -> None:
        placeholder = graph.placeholder(name)
        placeholder.meta = {"val": like}
        copies.update(dict.fromkeys(sources, placeholder))

    for entry in layer.entries:
        take(f"{entry.name}_rows", [entry], entry.meta["val"])
    example = layer.ids.meta["val"]
    take("ordered", [n for n, kind in layer.routing.items() if kind == "ordered"], example)
    like = next(n for n, kind in layer.routing.items() if kind == "ends").meta["val"]
    take("ends", [n for n, kind in layer.routing.items() if kind == "ends"], like)
    for weight in weights:
        take(f"{weight.name}_of_experts", [weight], weight.meta["val"])
    for node in layer.body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[layer.exit.args[0]])  # type: ignore[index]
    return fx.GraphModule(torch.nn.Module(), graph)
