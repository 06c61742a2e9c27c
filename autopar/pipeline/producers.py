"""Producers: the op or conversion that computes the memory of every tensor, and its name within its block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_model.flow import Flow
from autopar.ir import Graph, Layout, Plan
from autopar.ir.recompute import Selection
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.parts import find_parts

Memory = tuple[str, Layout]  # a tensor in a layout

Producer = tuple[str, str]  # an op and "", or an op and the tensor that is converted for it


def op_names(graph: Graph, plan: Plan) -> dict[str, tuple[str, str]]:
    """Path of the block and name within it, for every op of a block that may be recomputed."""
    cuts = plan.pipeline.cuts if plan.pipeline else ()
    blocks = find_blocks(graph)
    parts = find_parts(graph, {*(block.start for block in blocks), *cuts})
    at = {part.start: part for part in parts}
    found: dict[str, tuple[str, str]] = {}
    counts: Counter[tuple[int, str]] = Counter()
    part = parts[0]
    for op in graph.ops:
        part = at.get(op.name, part)
        if part.may_repeat:
            path = blocks[part.block].module
            name = f"{_within(op.module, path)}/{op.kind.removeprefix('aten.')}"
            counts[part.block, name] += 1
            number = counts[part.block, name]
            found[op.name] = path, f"{name}#{number}" if number > 1 else name
    return found


def _within(module: str, path: str) -> str:
    return module.removeprefix(path).removeprefix(".") if path else module


def recomputable_names(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """Path of every block -> names of its ops and conversions that may be recomputed under a plan."""
    producers, names = Producers.find(graph, Flow(graph, plan)), op_names(graph, plan)
    found: dict[str, list[str]] = {}
    for producer in producers.of.values():
        if producer[0] in names:
            path, name = names[producer[0]]
            found.setdefault(path, []).append(producer_name(graph, name, producer))
    return found


def producer_name(graph: Graph, name: str, producer: Producer) -> str:
    """The name within its block of an op or a conversion, given the name of the op."""
    op, converted = producer
    return f"{name}<{graph.by_name[op].operands.index(converted)}" if converted else name


@dataclass(frozen=True)
class Producers:
    """The op or conversion that computes the memory of every tensor; views compute none.

    Attributes:
        of: memory -> its producer, in the order of the forward.
        source: a conversion -> the memory that it reads.
    """

    of: Mapping[Memory, Producer]
    source: Mapping[Producer, Memory]

    @classmethod
    def find(cls, graph: Graph, flow: Flow) -> Producers:
        """Finds the producers for the layouts that `flow` has."""
        of: dict[Memory, Producer] = {}
        source: dict[Producer, Memory] = {}
        leaves = (*graph.parameters.values(), *graph.buffers.values(), *graph.inputs.values())
        made = {flow.saved.memory(name, flow.produced[name]) for name in leaves}
        for op in graph.ops:
            for name, layout in zip(op.operands, flow.operands[op.name], strict=True):
                memory, before = (flow.saved.memory(name, at) for at in (layout, flow.produced[name]))
                if memory not in made:
                    made.add(memory)
                    of[memory] = op.name, name
                    source.setdefault((op.name, name), before)
            for name, layout in zip(op.results, flow.results[op.name], strict=True):
                memory = flow.saved.memory(name, layout)
                if memory not in made:
                    made.add(memory)
                    of[memory] = op.name, ""
        return cls(of, source)


def recomputed_producers(graph: Graph, plan: Plan, selection: Selection) -> dict[Producer, bool]:
    """For every op and conversion of the plan, whether backward recomputes it; a view is as its operand."""
    flow = Flow(graph, plan)
    producers, names = Producers.find(graph, flow), op_names(graph, plan)

    def is_chosen(producer: Producer | None) -> bool:
        if producer is None or producer[0] not in names:
            return False
        path, name = names[producer[0]]
        return producer_name(graph, name, producer) in selection.names(path)

    found = {producer: is_chosen(producer) for producer in producers.of.values()}
    for op in graph.ops:
        for name, layout in zip(op.operands, flow.operands[op.name], strict=True):
            producer = producers.of.get(flow.saved.memory(name, layout))
            found.setdefault((op.name, name), is_chosen(producer))
        for name, layout in zip(op.results, flow.results[op.name], strict=True):
            producer = producers.of.get(flow.saved.memory(name, layout))
            found.setdefault((op.name, ""), is_chosen(producer))
    return found
