"""The tensors that a plan's `saved` lines name, and what blocks keep of them for backward.

A block's inputs are the activations that enter it: tensors with a gradient, made by an op of another block. They are
named in the order of their first use, `layers.3.input`, `layers.3.input#2`, each as the memory that it lies in (a
view of the same memory has no name of its own). Of a block that is recomputed they are all that stays (its
checkpoints); of any other block those stay that one of its ops saves.

A line slices an input where every rank has all of it. It is left alone where the axis splits it already, where it
holds partial sums, where it shows a part of a larger memory, and where it crosses between the pipeline's stages,
because torch.distributed.pipelining keeps what a stage received and sent.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.flow import Flow
from autopar.cost_model.memory import KeptSlice
from autopar.errors import PlanError
from autopar.ir import Graph, Layout, Op, Plan, R, S, State
from autopar.ir.layout import format_layout
from autopar.ir.recompute import Selection, path_pattern
from autopar.ir.saved import SavedLayout, can_slice
from autopar.pipeline.blocks import find_blocks, has_blocks
from autopar.pipeline.parts import Part, is_whole, parts_of_ops, repeating_parts
from autopar.pipeline.recomputable import BlockChoices, Makers, Memory, block_choices


@dataclass(frozen=True)
class BlockInput:
    """An activation that enters a block.

    Attributes:
        path: path of the block's module.
        number: 1 for the first input of the blocks of this path, 2 for the second.
        tensor: name of the tensor as the block takes it.
        layout: its layout, R in place of V.
        memory: the memory that it lies in.
        block: number of the block, or of the part of it that a stage has.
        user: name of the first op of the block that takes it.
    """

    path: str
    number: int
    tensor: str
    layout: Layout
    memory: Memory
    block: int
    user: str

    @property
    def name(self) -> str:
        """`layers.3.input#2`."""
        return self._at(self.path)

    @property
    def pattern(self) -> str:
        """The same with `*` for numbers in the path of the block."""
        return self._at(path_pattern(self.path))

    def _at(self, path: str) -> str:
        own = "input" if self.number == 1 else f"input#{self.number}"
        return f"{path}.{own}" if path else own

    def line(self, saved: Mapping[str, SavedLayout]) -> SavedLayout | None:
        """The line for this input: that of its own name, or else of the pattern."""
        return saved.get(self.name, saved.get(self.pattern))


@dataclass(frozen=True)
class SavedValues:
    """What the blocks of a plan keep in slices.

    Args:
        graph: the captured model, with all of its layers.
        plan: its plan.
    """

    graph: Graph
    plan: Plan

    @cached_property
    def inputs(self) -> tuple[BlockInput, ...]:
        """The inputs of all blocks that may be recomputed, in order; none of a model that has no blocks."""
        if not has_blocks(self.graph) or not is_whole(self.graph):
            return ()
        counts: Counter[str] = Counter()
        found: dict[tuple[int, Memory], BlockInput] = {}
        for op in self.graph.ops:
            block = self._blocks[op.name]
            if not self._parts[block].may_repeat:
                continue
            path = self._paths[self._parts[block].block]
            for name, layout in self._entering(op):
                memory = self._flow.saved.memory(name, layout)
                if (block, memory) not in found:
                    counts[path] += 1
                    found[block, memory] = BlockInput(
                        path, counts[path], name, _unvaried(layout), memory, block, op.name
                    )
        return tuple(found.values())

    @cached_property
    def slices(self) -> tuple[KeptSlice, ...]:
        """What blocks keep in slices, in order."""
        return tuple(self._slices()) if self.plan.saved else ()

    def _slices(self) -> Iterator[KeptSlice]:
        for each in self.inputs:
            line = each.line(self.plan.saved)
            if line is None or not self._is_free(each) or not self._keeps(each):
                continue
            found = line.of(each.layout)
            if found != each.layout:
                yield KeptSlice(
                    each.name, each.memory, each.tensor, each.layout, found, each.block, each.user
                )

    def check(self) -> None:
        """Raises PlanError for a line of an input that the model does not have, or that cannot be sliced so."""
        for name in self.plan.saved:
            if not any(name in (each.name, each.pattern) for each in self.inputs):
                some = ", ".join(dict.fromkeys(each.pattern for each in self.inputs)) or "none"
                raise PlanError(
                    f"The plan saves {name} in a layout of its own, which the model does not have. The "
                    f"activations that enter its blocks are {some}."
                )
        for each in self.inputs:
            line = each.line(self.plan.saved)
            if line is not None:
                self._check_line(each, line)

    def _check_line(self, each: BlockInput, line: SavedLayout) -> None:
        dims, mesh = self.graph.tensors[each.tensor].dims, self.plan.mesh
        if not self._allows(each, line):
            raise PlanError(
                f"The plan saves {each.name} as {line.text(mesh)}, which does not slice it: it has the shape "
                f"{list(self.graph.tensors[each.tensor].shape)} in dims of factors {dims}, and lies as "
                f"{format_layout(each.layout, mesh)} on the mesh {mesh}. Name a dim that the axis divides, and that "
                "no later axis splits."
            )

    def holds(self, name: str) -> bool:
        """Whether the model has the input of a line, and can slice it so wherever the line is for."""
        meant = [each for each in self.inputs if name in (each.name, each.pattern)]
        lines = [(each, each.line(self.plan.saved)) for each in meant]
        return bool(meant) and all(line is None or self._allows(each, line) for each, line in lines)

    # --- the word "partitioned"

    def partitioned(self) -> dict[str, SavedLayout]:
        """Lines that slice every input along every axis on which it is replicated, by the first dim that can be.

        One line for all blocks of a pattern where it is the same for them.
        """
        wanted: dict[str, dict[str, SavedLayout | None]] = {}
        for each in self.inputs:
            is_kept = self._is_free(each) and self._keeps(each)
            found = self._best(each) if is_kept else None
            wanted.setdefault(each.pattern, {})[each.name] = found
        lines: dict[str, SavedLayout] = {}
        for pattern, names in wanted.items():
            some = {name: line for name, line in names.items() if line is not None}
            is_one = len({*some.values()}) == 1 and all(
                self._allows(each, next(iter(some.values())))
                for each in self.inputs
                if each.pattern == pattern
            )
            lines |= {pattern: next(iter(some.values()))} if is_one else some
        return lines

    def _allows(self, each: BlockInput, line: SavedLayout) -> bool:
        dims = self.graph.tensors[each.tensor].dims
        return can_slice(dims, each.layout, line.of(each.layout), self.plan.mesh)

    def _best(self, each: BlockInput) -> SavedLayout | None:
        return self.sliced(each, lambda options: options[0])

    def sliced(
        self, each: BlockInput, choose: Callable[[list[State]], State]
    ) -> SavedLayout | None:
        """A line for an input: `choose` picks the state for every axis that replicates it; None for no line."""
        line = SavedLayout((R,) * len(self.plan.mesh.axes))
        dims = self.graph.tensors[each.tensor].dims
        states = [S(dim) for dim in range(len(dims))]
        states += [S(dim, i) for dim, sizes in enumerate(dims) for i in range(1, len(sizes))]
        for axis, size in enumerate(self.plan.mesh.sizes):
            lines = [
                SavedLayout((*line.split[:axis], state, *line.split[axis + 1 :]))
                for state in states
                if size > 1 and each.layout[axis] == R
            ]
            options = [found.split[axis] for found in lines if self._allows(each, found)]
            state = choose(options) if options else R
            line = SavedLayout((*line.split[:axis], state, *line.split[axis + 1 :]))
        return line if any(state != R for state in line.split) else None

    # --- what enters a block, and what stays of it

    def _entering(self, op: Op) -> Iterator[tuple[str, Layout]]:
        """Operands of an op that other blocks made, in the layout in which they enter."""
        for name, layout in zip(op.operands, self._flow.operands[op.name], strict=True):
            entering = layout
            if self._is_inside(op, name, layout):  # converted here
                entering = self._flow.produced[name]
            root = self._flow.saved.root(name)
            has_maker = self.graph.tensors[name].needs_grad and root in self.graph.producer
            if has_maker and not self._is_inside(op, name, entering):
                yield name, entering

    def _is_inside(self, op: Op, name: str, layout: Layout) -> bool:
        maker = self._makers.of.get(self._flow.saved.memory(name, layout))
        return maker is not None and self._blocks[maker[0]] == self._blocks[op.name]

    def _is_free(self, each: BlockInput) -> bool:
        """Whether the memory shows nothing but the input, and does not cross between stages."""
        name = each.tensor
        while name != each.memory[0]:
            view = self._flow.saved.view(name)
            assert view is not None, f"{each.tensor} is a view of {each.memory[0]}"
            if not view.is_whole:
                return False
            name = view.operand
        return len(self._stages[self._flow.saved.root(each.memory[0])]) == 1

    def _keeps(self, each: BlockInput) -> bool:
        """Whether the block keeps the input for backward."""
        if each.block not in self._again:
            return self._is_saved(each)
        if not isinstance(self.plan.recompute, Selection):
            return True
        names = self.plan.recompute.names(each.path)
        return each.memory in self._choices[each.block].kept(names)

    def _is_saved(self, each: BlockInput) -> bool:
        tensor = self._choices[each.block].tensors.get(each.memory)
        return tensor is not None and tensor.is_saved

    def _stage(self, op: str) -> int:
        return bisect.bisect_right(self._cuts, self._places[op])

    # --- what the plan says of all blocks

    @cached_property
    def _flow(self) -> Flow:
        return Flow(self.graph, self.plan)

    @cached_property
    def _makers(self) -> Makers:
        return Makers.find(self.graph, self._flow)

    @cached_property
    def _repeating(self) -> tuple[tuple[Part, ...], frozenset[int]]:
        return repeating_parts(self.graph, self.plan)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self._repeating[0]

    @property
    def _again(self) -> frozenset[int]:
        return self._repeating[1]

    @cached_property
    def _blocks(self) -> dict[str, int]:
        return parts_of_ops(self.graph, self.plan)

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        return tuple(block.module for block in find_blocks(self.graph))

    @cached_property
    def _choices(self) -> list[BlockChoices[Memory]]:
        return block_choices(
            self.graph, self.plan, self._flow, unit=self._blocks, seconds={}, size=lambda _: 0.0
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.graph.ops)}

    @cached_property
    def _cuts(self) -> list[int]:
        cuts = self.plan.pipeline.cuts if self.plan.pipeline else ()
        return [self._places[name] for name in cuts]

    @cached_property
    def _stages(self) -> dict[str, set[int]]:
        """Root of a memory -> the stages that make it, or take it or a view of it."""
        found: dict[str, set[int]] = {}
        for op in self.graph.ops:
            for name in (*op.operands, *op.results):
                found.setdefault(self._flow.saved.root(name), set()).add(self._stage(op.name))
        for name in self.graph.outputs:
            found.setdefault(self._flow.saved.root(name), set()).add(len(self._cuts))
        return found


def possible_lines(graph: Graph, plan: Plan) -> dict[str, SavedLayout]:
    """The saved lines of a plan that hold for this graph of the same model, which has other ops or sizes.

    Those of an input that is not there, or that cannot be sliced so, are left out.
    """
    values = SavedValues(graph, plan) if plan.saved else None
    return {
        name: line for name, line in plan.saved.items() if values is not None and values.holds(name)
    }


def _unvaried(layout: Layout) -> Layout:
    return tuple(R if state.kind == "V" else state for state in layout)
