"""The tensors of a plan's blocks that a `saved` line can name.

The inputs of a block are the activations that enter it: tensors with a gradient that an op of another block computes.
In the order of their first use they are called `layers.3.input`, `layers.3.input#2` and so on. Views of the same memory
count as one input. A tensor that the block computes itself has the name of the op or conversion that computes it
(see [Note: recomputing ops] in `autopar.pipeline.recomputable`): `layers.3.mlp.act/gelu` is the first result of an op,
`layers.3.mlp.up/linear<0` is an operand after its conversion for the op.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.flow import Flow
from autopar.ir import Graph, Layout, Op, Plan, R
from autopar.ir.recompute import path_pattern
from autopar.ir.saved import SavedLayout
from autopar.pipeline.blocks import find_blocks, has_blocks
from autopar.pipeline.parts import Part, is_whole, parts_of_ops, repeating_parts
from autopar.pipeline.producers import Memory, Producer, Producers
from autopar.pipeline.recomputable import BlockChoices, block_choices


@dataclass(frozen=True)
class BlockValue:
    """A tensor that a block may keep for backward.

    Attributes:
        path: path of the block's module.
        own: name of the tensor within the block, such as `input#2` or `mlp.act/gelu`.
        tensor: name of the tensor in the graph.
        layout: layout of the tensor, with R in place of V.
        memory: tensor and layout that identify its memory (`SavedTensors.memory`).
        block: index of the block, or of the part of the block in a stage.
        user: name of the first op of the block that uses the tensor.
    """

    path: str
    own: str
    tensor: str
    layout: Layout
    memory: Memory
    block: int
    user: str

    @property
    def name(self) -> str:
        """Name of the tensor in the model, such as `layers.3.input#2`."""
        return f"{self.path}.{self.own}" if self.path else self.own

    @property
    def pattern(self) -> str:
        """Name of the tensor with `*` for numbers in the path of the block, such as `layers.*.input#2`."""
        return f"{path_pattern(self.path)}.{self.own}" if self.path else self.own

    def line(self, saved: Mapping[str, SavedLayout]) -> SavedLayout | None:
        """The `saved` line of a plan for this tensor: the line with its name, or else the one with its pattern."""
        return saved.get(self.name, saved.get(self.pattern))


@dataclass(frozen=True)
class BlockValues:
    """The tensors of all blocks that may be recomputed; none if the graph has no blocks, or lacks layers of the model.

    Args:
        graph: the captured model.
        plan: its plan.
    """

    graph: Graph
    plan: Plan

    @cached_property
    def inputs(self) -> tuple[BlockValue, ...]:
        """The tensors that enter the blocks, in order."""
        if not has_blocks(self.graph) or not is_whole(self.graph):
            return ()
        counts: Counter[str] = Counter()
        found: dict[tuple[int, Memory], BlockValue] = {}
        for op in self.graph.ops:
            block = self.blocks[op.name]
            if not self.parts[block].may_repeat:
                continue
            path = self._paths[self.parts[block].block]
            for name, layout in self._entering(op):
                memory = self.flow.saved.memory(name, layout)
                if (block, memory) not in found:
                    counts[path] += 1
                    own = "input" if counts[path] == 1 else f"input#{counts[path]}"
                    found[block, memory] = BlockValue(path, own, name, _unvaried(layout), memory, block, op.name)
        return tuple(found.values())

    @cached_property
    def made(self) -> tuple[BlockValue, ...]:
        """The tensors that the blocks compute, and that an op other than the computing one saves, in order."""
        if not has_blocks(self.graph) or not is_whole(self.graph):
            return ()
        return tuple(
            value
            for block, choices in enumerate(self.choices)
            if self.parts[block].may_repeat
            for value in self._made(block, choices)
        )

    def _made(self, block: int, choices: BlockChoices[Memory]) -> Iterator[BlockValue]:
        producers = {name: producer for producer, name in choices.name_of.items()}
        for memory, kept in choices.tensors.items():
            if kept.producer is None or not kept.is_saved:
                continue
            tensor, layout = self._result(producers[kept.producer])
            op = self.graph.by_name[producers[kept.producer][0]]
            # Autograd keeps an op's own result before any note on it.
            saves_itself = tensor in op.saved and tensor in op.results
            if self.flow.saved.memory(tensor, layout) == memory and not saves_itself:
                path, user = self._paths[self.parts[block].block], choices.first_user[memory]
                yield BlockValue(path, kept.producer, tensor, _unvaried(layout), memory, block, user)

    def _result(self, producer: Producer) -> tuple[str, Layout]:
        """The tensor that an op or a conversion computes, and its layout."""
        op, converted = producer
        if not converted:
            return self.graph.by_name[op].results[0], self.flow.results[op][0]
        position = self.graph.by_name[op].operands.index(converted)
        return converted, self.flow.operands[op][position]

    # --- what enters a block

    def _entering(self, op: Op) -> Iterator[tuple[str, Layout]]:
        """Operands of an op that other blocks compute, with the layouts in which they enter the block."""
        for name, layout in zip(op.operands, self.flow.operands[op.name], strict=True):
            entering = layout
            if self._is_inside(op, name, layout):  # converted here
                entering = self.flow.produced[name]
            root = self.flow.saved.root(name)
            has_maker = self.graph.tensors[name].needs_grad and root in self.graph.producer
            if has_maker and not self._is_inside(op, name, entering):
                yield name, entering

    def _is_inside(self, op: Op, name: str, layout: Layout) -> bool:
        producer = self._producers.of.get(self.flow.saved.memory(name, layout))
        return producer is not None and self.blocks[producer[0]] == self.blocks[op.name]

    def is_apart(self, value: BlockValue) -> bool:
        """Whether a tensor fills its memory, and is not sent between stages."""
        name = value.tensor
        while name != value.memory[0]:
            view = self.flow.saved.view(name)
            assert view is not None, f"{value.tensor} is a view of {value.memory[0]}"
            if not view.is_whole:
                return False
            name = view.operand
        return len(self._stages[self.flow.saved.root(value.memory[0])]) == 1

    # --- what the plan says of all blocks

    @cached_property
    def flow(self) -> Flow:
        """The layouts of the plan's tensors."""
        return Flow(self.graph, self.plan)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Name of every op -> index of its block."""
        return parts_of_ops(self.graph, self.plan)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The blocks, those that a stage cuts as two."""
        return self._repeating[0]

    @property
    def again(self) -> frozenset[int]:
        """Indices of the blocks that are recomputed, whole or in part."""
        return self._repeating[1]

    @cached_property
    def choices(self) -> list[BlockChoices[Memory]]:
        """For every block, the ops that it may recompute, and the tensors that it may keep."""
        return block_choices(self.graph, self.plan, self.flow, unit=self.blocks, seconds={}, size=lambda _: 0.0)

    @cached_property
    def _repeating(self) -> tuple[tuple[Part, ...], frozenset[int]]:
        return repeating_parts(self.graph, self.plan)

    @cached_property
    def _producers(self) -> Producers:
        return Producers.find(self.graph, self.flow)

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        return tuple(block.module for block in find_blocks(self.graph))

    @cached_property
    def _stages(self) -> dict[str, set[int]]:
        """Name of a tensor with its own memory -> the stages that compute it, or use it or a view of it."""
        places = {op.name: i for i, op in enumerate(self.graph.ops)}
        cuts = [places[name] for name in (self.plan.pipeline.cuts if self.plan.pipeline else ())]
        found: dict[str, set[int]] = {}
        for op in self.graph.ops:
            stage = bisect.bisect_right(cuts, places[op.name])
            for name in (*op.operands, *op.results):
                found.setdefault(self.flow.saved.root(name), set()).add(stage)
        for name in self.graph.outputs:
            found.setdefault(self.flow.saved.root(name), set()).add(len(cuts))
        return found


def _unvaried(layout: Layout) -> Layout:
    return tuple(R if state.kind == "V" else state for state in layout)
