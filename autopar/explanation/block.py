"""The repeated layer as a graph to draw: its ops as a plan runs them, small ones of a module as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.cost_model.compute import OpPrice, is_product
from autopar.cost_model.items import COMPUTE
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.sizes import Sizes
from autopar.explanation.explanation import Explanation
from autopar.ir import Graph, Op, Stack
from autopar.views import BlockCollective, BlockNode


def block_of(e: Explanation) -> tuple[BlockNode, ...]:
    """The nodes of a drawing of one repeated layer, or of the whole model if it has no repeated layers.

    The layer is the middle one of the model's first list of layers. Views are left out, and small ops of one
    module are merged (`merged`).
    """
    nodes = tuple(_nodes(e))
    products = {op.results[0] for op in e.graph.ops if op.results and is_product(op)}
    return merged(nodes, products)


def _nodes(e: Explanation) -> Iterator[BlockNode]:
    mesh = e.plan.mesh
    links = [e.cluster.hardware.link(mesh, axis) for axis in range(len(mesh.axes))]
    sizes = Sizes(mesh)
    pricer = Pricer(e.graph, e.plan, sizes=sizes, hardware=e.cluster.hardware, links=links)
    behind, names = _behind_views(e.graph), _parameter_names(e.graph)
    for op in e.graph.ops:
        if op.is_view or not _in_block(op, e.graph):
            continue
        labels = e.plan.ops[op.name]
        price = OpPrice.of(op, labels, e.graph.tensors, sizes, e.cluster.hardware)
        chosen = [op.choice(label) for label in labels]
        operands = tuple(behind.get(name, name) for name in op.operands)
        yield BlockNode(
            op.results[0],
            op.kind.removeprefix("aten."),
            op.module,
            tuple(
                (axis, e.factor_words.get(choice.factor, choice.factor))
                for (axis, size), choice in zip(mesh.axes, chosen, strict=True)
                if choice.splits and size > 1
            ),
            float(price.forward.seconds),
            operands,
            tuple(_collectives(pricer, op, operands, names)),
        )


def _collectives(
    pricer: Pricer, op: Op, operands: tuple[str, ...], names: Mapping[str, str]
) -> Iterator[BlockCollective]:
    for position, operand in enumerate(operands):
        name = names.get(operand, operand)
        for item in pricer.into(op, position):
            if item.resource != COMPUTE and float(item.traffic_bytes) > 0:
                yield BlockCollective(item.resource, item.kind, float(item.traffic_bytes), float(item.seconds), name)


def _parameter_names(graph: Graph) -> dict[str, str]:
    """Tensor of a parameter -> the parameter's name, inside of the drawn layer without the path of the layer."""
    path = f"{graph.stacks[0].path}.{graph.stacks[0].middle}." if graph.stacks else ""
    return {tensor: name.removeprefix(path) for name, tensor in graph.parameters.items()}


def _in_block(op: Op, graph: Graph) -> bool:
    place: tuple[Stack, int] | None = graph.stack_of(op.module)
    if not graph.stacks:
        return True
    return place is not None and place[0] == graph.stacks[0] and place[1] == place[0].middle


def _behind_views(graph: Graph) -> dict[str, str]:
    """Result of a view -> the tensor that it is a view of."""
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.is_view and op.operands:
            found.update({name: found.get(op.operands[0], op.operands[0]) for name in op.results})
    return found


def merged(nodes: Sequence[BlockNode], products: set[str]) -> tuple[BlockNode, ...]:
    """Merges small ops of one module into one box, if they are split alike and feed only each other.

    A node joins the nodes that make its operands if all of them are of its module and layouts and no
    collective stands between. The nodes in `products`, matrix products, stay by themselves. Returns the nodes
    unchanged if merging would make a cycle.
    """
    by_name = {node.name: node for node in nodes}
    head: dict[str, str] = {}  # node -> the first of its group
    for node in nodes:
        producers = [by_name[name] for name in node.operands if name in by_name]
        head[node.name] = node.name
        if producers and all(_alike(node, producer, products) for producer in producers):
            join = {head[producer.name] for producer in producers}
            first = next(name for name in head if name in join)
            head.update({name: first for name, at in head.items() if at in join})
            head[node.name] = first
    groups: dict[str, list[BlockNode]] = {}
    for node in nodes:
        groups.setdefault(head[node.name], []).append(node)
    found = tuple(_one(group, head) for group in groups.values())
    return _in_order(found) or tuple(nodes)


def _alike(node: BlockNode, producer: BlockNode, products: set[str]) -> bool:
    return (
        (node.module, node.layouts) == (producer.module, producer.layouts)
        and not node.collectives
        and not products & {node.name, producer.name}
    )


def _one(group: Sequence[BlockNode], head: Mapping[str, str]) -> BlockNode:
    """A group as a node, under the name of its first."""
    inside = {node.name for node in group}
    operands = (name for node in group for name in node.operands if name not in inside)
    kinds = list(dict.fromkeys(node.kind for node in group))
    shown = ", ".join(kinds) if len(kinds) <= 3 else f"{', '.join(kinds[:2])} ... {kinds[-1]}"
    moved = [each._replace(operand=head.get(each.operand, each.operand)) for node in group for each in node.collectives]
    return group[0]._replace(
        kind=shown,
        seconds=sum(node.seconds for node in group),
        operands=tuple(dict.fromkeys(head.get(name, name) for name in operands)),
        collectives=tuple(moved),
    )


def _in_order(nodes: Sequence[BlockNode]) -> tuple[BlockNode, ...]:
    """The nodes after all that they need; none where they need each other."""
    waiting, done = list(nodes), list[BlockNode]()
    while waiting:
        left = {node.name for node in waiting}
        ready = [node for node in waiting if not left & set(node.operands)]
        if not ready:
            return ()
        done += ready
        waiting = [node for node in waiting if node not in ready]
    return tuple(done)
