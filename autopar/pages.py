"""An explanation as the page that views show."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_model.breakdown import Breakdown
from autopar.cost_model.compute import OpPrice
from autopar.cost_model.items import COMPUTE, Item, Pricer
from autopar.cost_model.sizes import Sizes
from autopar.explanation import Explanation
from autopar.ir import Graph, Op, Stack
from autopar.views import BlockCollective, BlockNode, Formula, Page, RooflinePoint
from autopar.views.units import format_bytes, format_seconds


def page_of(explanation: Explanation, title: str) -> Page:
    """Everything there is to show of a plan."""
    hardware = explanation.cluster.hardware
    return Page(
        title=title,
        subtitle=_subtitle(explanation),
        figures=tuple(_figures(explanation)),
        memory=explanation.memory,
        memory_bound_bytes=explanation.bound_bytes,
        time=explanation.time,
        traffic=explanation.traffic,
        events=explanation.events(),
        candidates=explanation.candidates,
        roofline=tuple(_roofline(explanation)),
        peak_flops=hardware.flops_per_second(_itemsize(explanation.graph)),
        memory_bytes_per_second=hardware.memory_bytes_per_second,
        block=tuple(_block(explanation)),
        formulas=tuple(_formulas(explanation)),
        sensitivity=explanation.sensitivity(),
        notes=tuple(explanation.plan.notes) + _caveats(explanation),
        document=explanation.to_json(),
    )


def _subtitle(e: Explanation) -> str:
    stages = f", {int(e.run.stages)} pipeline stages" if e.run.stages > 1 else ""
    again = ", layers run again in backward" if e.run.recompute == "full" else ""
    return (
        f"{e.plan.mesh} on {e.cluster}{stages}, {int(e.run.micro_batches)} micro-batches{again}, "
        f"recipe {e.plan.recipe}"
    )


def _figures(e: Explanation) -> Iterator[tuple[str, str]]:
    yield "step", format_seconds(e.step_seconds)
    if e.tokens_per_second is not None:
        yield "tokens per second", f"{e.tokens_per_second:,.0f}"
    yield "model FLOPs utilization", f"{100 * e.mfu:.1f} %"
    yield "memory of a rank", f"{format_bytes(e.memory_bytes)} of {format_bytes(e.bound_bytes)}"
    yield "sent by a rank", f"{format_bytes(e.traffic.value)} a step"


def _formulas(e: Explanation) -> Iterator[Formula]:
    yield Formula("step time", e.time.expression, format_seconds(e.time.value))
    yield Formula("memory of a rank", e.memory.expression, format_bytes(e.memory.value))
    yield Formula("traffic", e.traffic.expression, format_bytes(e.traffic.value))
    for tree, shown in ((e.time, format_seconds), (e.memory, format_bytes)):
        for part in _largest(tree):
            yield Formula(part.name, part.expression, shown(part.value))


def _largest(tree: Breakdown, count: int = 4) -> tuple[Breakdown, ...]:
    return tree.parts[:count]


def _roofline(e: Explanation) -> Iterator[RooflinePoint]:
    for item in e.step.items:
        if item.resource == COMPUTE and item.phase == "forward" and _works(item):
            seconds = float(item.seconds)
            yield RooflinePoint(
                item.name, float(item.flops) / float(item.traffic_bytes),
                float(item.flops) / seconds, float(item.count) * seconds,
            )  # fmt: skip


def _works(item: Item) -> bool:
    return float(item.flops) > 0 and float(item.traffic_bytes) > 0 and float(item.seconds) > 0


def _block(e: Explanation) -> Iterator[BlockNode]:
    """The ops of the layer in the middle; of the whole model where no layers repeat."""
    mesh = e.plan.mesh
    links = [e.cluster.hardware.link(mesh, axis) for axis in range(len(mesh.axes))]
    sizes = Sizes(mesh)
    pricer = Pricer(e.graph, e.plan, sizes=sizes, hardware=e.cluster.hardware, links=links)
    behind = _behind_views(e.graph)
    for op in e.graph.ops:
        if op.is_view or not _in_block(op, e.graph):
            continue
        labels = e.plan.ops[op.name]
        price = OpPrice.of(op, labels, e.graph.tensors, sizes, e.cluster.hardware)
        operands = tuple(behind.get(name, name) for name in op.operands)
        yield BlockNode(
            op.results[0], op.kind.removeprefix("aten."), op.module,
            tuple(
                (axis, op.choice(label).factor)
                for axis, label in zip(mesh.names, labels, strict=True)
                if op.choice(label).splits
            ),
            float(price.forward.seconds), operands, tuple(_collectives(pricer, op, operands)),
        )  # fmt: skip


def _collectives(pricer: Pricer, op: Op, operands: tuple[str, ...]) -> Iterator[BlockCollective]:
    for position, operand in enumerate(operands):
        for item in pricer.into(op, position):
            if item.resource != COMPUTE:
                yield BlockCollective(
                    item.resource, item.kind, float(item.traffic_bytes), float(item.seconds), operand
                )


def _in_block(op: Op, graph: Graph) -> bool:
    place: tuple[Stack, int] | None = graph.stack_of(op.module)
    if not graph.stacks:
        return True
    return place is not None and place[0] == graph.stacks[0] and place[1] == place[0].middle


def _behind_views(graph: Graph) -> dict[str, str]:
    """What a view's result really is: the tensor that it looks at."""
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.is_view and op.operands:
            found.update({name: found.get(op.operands[0], op.operands[0]) for name in op.results})
    return found


def _itemsize(graph: Graph) -> int:
    return min((t.itemsize_bytes for t in graph.tensors.values() if t.needs_grad), default=4)


def _caveats(e: Explanation) -> tuple[str, ...]:
    notes = []
    if e.run.stages > 1:
        notes.append("Pipeline stages are priced by formula; this version cannot run them.")
    if e.run.recompute == "full":
        notes.append("Recomputation is priced by formula; this version does not insert it.")
    without = sorted({op.kind for op in e.graph.ops if not op.has_rule})
    if without:
        notes.append(f"Ops without a rule run replicated: {', '.join(without)}.")
    return tuple(notes)
