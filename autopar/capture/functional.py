"""Makes an exported graph functional, and does the work for blocks that are alike once.

`ExportedProgram.run_decompositions({})` runs every call of a graph twice through all layers of torch's tracer, and
takes twice as long as the trace of the model itself. Blocks that are alike give parts of the functional graph that are
alike. So of a row of such blocks (`autopar.capture.alike_blocks`) only the first and the last are made functional, and
the others are copies of the first:

    %x1 = block_0(%x0); %x2 = block_1(%x1); ...; %x9 = block_8(%x8)
    -> %x1 = block_0(%x0); %x9 = block_8(%x1)                       the short graph, which torch makes functional
    -> %x1 = made_0(%x0); %x9 = made_8(%x1)
    -> %x1 = made_0(%x0); %x2 = made_1(%x1); ...; %x9 = made_8(%x8)

The made parts of the first and the last block are compared. Where they differ in more than their operands, or where it
is not certain what a copy reads, torch makes the whole graph functional. So it does where the model writes to a buffer
that a block reads: before `buffer[:2] = 0` and after it, the exported graph has one name for the buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autopar.capture.alike_blocks import AlikeBlocks, find_alike_blocks
from autopar.ops.call_kinds import arguments_of, is_like

_PLACE = "autopar_place"  # of a call in the first or the last block, in the metadata of nodes
_OF_PLACE = ("nn_module_stack", "stack_trace")  # metadata that differs from block to block


def make_functional(exported: Any) -> Any:
    """The program that `exported.run_decompositions({})` returns."""
    graph = exported.graph_module.graph
    alike = find_alike_blocks(graph)
    if alike is None:
        return exported.run_decompositions({})
    exported.graph_module.graph = _shortened(graph, alike)
    try:
        made = exported.run_decompositions({})
    finally:
        exported.graph_module.graph = graph
    copies = _PartCopies(made.graph_module.graph, alike)
    # A block left out may read what such a write has made.
    if copies.reads_any(_written(made.graph_signature)) or not copies.are_certain():
        return exported.run_decompositions({})
    copies.write()
    made.graph_module.recompile()
    return made


def _written(signature: Any) -> set[str]:
    """The names of the placeholders whose tensors a functional graph changes."""
    changed = {spec.target for spec in signature.output_specs if "MUTATION" in spec.kind.name}
    return {spec.arg.name for spec in signature.input_specs if {spec.target, spec.arg.name} & changed}


def _shortened(graph: fx.Graph, alike: AlikeBlocks) -> fx.Graph:
    """A copy of the graph without the blocks between the first and the last one, which have their places noted."""
    first, *left_out, before, last = alike.blocks
    known: dict[fx.Node, fx.Node] = {}
    gone = {node for block in (*left_out, before) for node in block}
    places = {node: (i, j) for i, block in enumerate((first, last)) for j, node in enumerate(block)}
    # The last block reads the first one in place of the one before it.
    standing_in = dict(zip(before, first, strict=True))
    short = fx.Graph()
    short.set_codegen(graph._codegen)
    for node in graph.nodes:
        if node in gone:
            continue
        known[node] = short.node_copy(node, lambda x: known[standing_in.get(x, x)])
        if node in places:
            custom = {**node.meta.get("custom", {}), _PLACE: places[node]}
            known[node].meta["custom"] = custom
    return short


class _PartCopies:
    """The parts of a functional graph that stand for the blocks which were left out.

    Args:
        graph: the functional graph of a shortened one.
        alike: the blocks of the whole graph, of which the shortened one has the first and the last.
    """

    def __init__(self, graph: fx.Graph, alike: AlikeBlocks) -> None:
        self.graph, self.alike = graph, alike
        places = {node: place for node in graph.nodes if (place := _taken_place(node))}
        self.first, self.last = (
            {node: offset for node, (block, offset) in places.items() if block == each} for each in (0, 1)
        )
        self.index = {node: i for part in (self.first, self.last) for i, node in enumerate(part)}
        named = {node.name: node for node in graph.find_nodes(op="placeholder")}
        # For every block, what it reads from outside in place of what the first one reads.
        self.given = [
            {named[one.name]: named[other.name] for one, other in given.items()}
            for given in alike.given
            if all(each.name in named for pair in given.items() for each in pair)
        ]

    # --- what is certain

    def reads_any(self, names: set[str]) -> bool:
        """Whether a block reads one of the placeholders of these names from outside."""
        return any(other.name in names for given in self.given for other in given.values())

    def are_certain(self) -> bool:
        """Whether the first part, with other operands, is that of every block between the first and the last."""
        return (
            0 < len(self.first) == len(self.last)
            and len(self.given) == len(self.alike.blocks)
            and self._hands_on_its_own()
            and self._is_read_by_last()
            and all(map(self._corresponds, self.first, self.last))
        )

    def _hands_on_its_own(self) -> bool:
        """Whether the block makes all values that the next one reads.

        A value that it only hands on would come from ever earlier blocks.
        """
        block, made = self.alike.blocks[0], set(self.first.values())
        own: set[fx.Node] = set()
        for offset, node in enumerate(block):
            # Of a call that makes no node the result is an operand.
            is_of_own = bool(node.all_input_nodes) and own.issuperset(node.all_input_nodes)
            if is_of_own or (offset in made and not _may_hand_on(node)):
                own.add(node)
        return all(node in own for node in block if not set(block).issuperset(node.users))

    def _is_read_by_last(self) -> bool:
        """Whether nothing but the first and the last part reads the first one."""
        inside = {*self.first, *self.last}
        return all(inside.issuperset(node.users) for node in self.first)

    def _corresponds(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether a call of the last part is that of the first one, with operands that correspond."""
        try:
            (arguments, operands), (others, other_operands) = arguments_of(one), arguments_of(other)
        except TypeError:
            return False
        return (
            self.first[one] == self.last[other]
            and (one.target, arguments) == (other.target, others)
            and is_like(one, other)
            and all(map(self._operand_corresponds, operands, other_operands))
        )

    def _operand_corresponds(self, one: fx.Node, other: fx.Node) -> bool:
        if not is_like(one, other):
            return False
        if one in self.first:
            return other in self.last and self.index[one] == self.index[other]
        return other in self.first or other is self.given[-1].get(one, one)

    # --- writing

    def write(self) -> None:
        """Puts the missing parts between the first and the last one."""
        latest = list(self.first)
        for number in range(1, len(self.alike.blocks) - 1):
            latest = self._write_part(number, latest)
        for node in self.last:
            for operand in node.all_input_nodes:
                if operand in self.first:
                    node.replace_input_with(operand, latest[self.index[operand]])

    def _write_part(self, number: int, before: Sequence[fx.Node]) -> list[fx.Node]:
        """Writes the part of a block, given the calls of the part before."""
        part: list[fx.Node] = []
        block, place = self.alike.blocks[number], next(iter(self.last))
        for one, other in zip(self.first, self.last, strict=True):
            operands = zip(arguments_of(one)[1], arguments_of(other)[1], strict=True)
            read = iter([self._read(*pair, number, part, before) for pair in operands])
            with self.graph.inserting_before(place):
                copy = self.graph.node_copy(one, functools.partial(_next, read))
            meta = block[self.first[one]].meta
            copy.meta |= {key: meta[key] for key in _OF_PLACE if key in one.meta and key in meta}
            part.append(copy)
        return part

    def _read(
        self, one: fx.Node, other: fx.Node, number: int, part: Sequence[fx.Node], before: Sequence[fx.Node]
    ) -> fx.Node:
        """The node that a block reads in place of `one`, read by the first block, and `other`, read by the last one."""
        if one in self.first:
            return part[self.index[one]]
        if other in self.first:
            return before[self.index[other]]
        return self.given[number].get(one, one)


def _next(nodes: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(nodes)


def _taken_place(node: fx.Node) -> tuple[int, int] | None:
    """The block and the call in it that a node is made of, which are taken out of its metadata."""
    custom = dict(node.meta.get("custom") or {})
    place: tuple[int, int] | None = custom.pop(_PLACE, None)
    if place is not None:
        node.meta["custom"] = custom
        if not custom:
            del node.meta["custom"]
    return place


def _may_hand_on(call: fx.Node) -> bool:
    """Whether one of several results of a call may be an operand, as of `broadcast_tensors`."""
    return isinstance(call.meta["val"], list | tuple) and len(call.all_input_nodes) > 1
