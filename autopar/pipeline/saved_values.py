"""The tensors that blocks save in slices or on the host, by the `saved` lines of a plan (see `autopar.ir.saved`).

A recomputed block saves its inputs, or the tensors that its recomputed ops read. Any other block saves what its ops
save. A `saved` line slices such a tensor along axes on which every rank has all of it (`autopar.pipeline.block_values`
has the names). It has no effect along an axis that splits the tensor already, or along which it is a partial sum. It
has no effect on a tensor that is a part of a larger memory, or that is sent between pipeline stages, because
torch.distributed.pipelining keeps the whole tensors that a stage received and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.memory import KeptSlice
from autopar.errors import PlanError
from autopar.ir import Graph, Plan, R, S, State, Tier
from autopar.ir.layout import format_layout
from autopar.ir.recompute import Selection
from autopar.ir.saved import SavedLayout, can_slice
from autopar.pipeline.block_values import BlockValue, BlockValues


@dataclass(frozen=True)
class SavedValues:
    """The tensors that the blocks of a plan save in slices.

    Args:
        graph: the captured model, with all of its layers.
        plan: its plan.
    """

    graph: Graph
    plan: Plan

    @cached_property
    def of(self) -> BlockValues:
        """The tensors that lines can name."""
        return BlockValues(self.graph, self.plan)

    @property
    def inputs(self) -> tuple[BlockValue, ...]:
        """The tensors that enter the blocks that may be recomputed, in order."""
        return self.of.inputs

    @cached_property
    def all(self) -> tuple[BlockValue, ...]:
        """The tensors that enter these blocks, and those that they compute themselves."""
        return (*self.of.inputs, *self.of.made)

    @cached_property
    def slices(self) -> tuple[KeptSlice, ...]:
        """The tensors saved in slices: first those that enter blocks, then those that blocks compute, each in order."""
        return tuple(self._slices()) if self.plan.saved else ()

    def _slices(self) -> Iterator[KeptSlice]:
        for each in self.all:
            line = each.line(self.plan.saved)
            if line is None or not self.is_kept(each):
                continue
            found = line.of(each.layout)
            if found != each.layout or line.tier != "device":
                yield KeptSlice(
                    each.name, each.memory, each.tensor, each.layout, found, each.block, each.user, line.tier
                )

    def check(self) -> None:
        """Raises PlanError for a line whose tensor the model does not have, or that cannot slice its tensor."""
        for name in self.plan.saved:
            if not any(name in (each.name, each.pattern) for each in self.all):
                own = [dict.fromkeys(e.pattern for e in few) for few in (self.inputs, self.of.made)]
                inputs, made = ", ".join(own[0]) or "none", ", ".join(list(own[1])[:3]) or "nothing"
                raise PlanError(
                    f"The plan gives a saved layout for {name}, which the model does not have. The activations that "
                    f"enter its blocks are {inputs}; they make and keep {made}, ..."
                )
        for each in self.all:
            line = each.line(self.plan.saved)
            if line is not None:
                self._check_line(each, line)

    def _check_line(self, each: BlockValue, line: SavedLayout) -> None:
        dims, mesh = self.graph.tensors[each.tensor].dims, self.plan.mesh
        if not self._allows(each, line):
            raise PlanError(
                f"The plan saves {each.name} as {line.text(mesh)}, which does not slice it: it has the shape "
                f"{list(self.graph.tensors[each.tensor].shape)} in dims of factors {dims}, and lies as "
                f"{format_layout(each.layout, mesh)} on the mesh {mesh}. Name a dim that the axis divides, and that "
                "no later axis splits."
            )

    def holds(self, name: str) -> bool:
        """Whether the model has the tensor of a line, and the line can slice it in every block that it matches."""
        meant = [each for each in self.all if name in (each.name, each.pattern)]
        lines = [(each, each.line(self.plan.saved)) for each in meant]
        return bool(meant) and all(line is None or self._allows(each, line) for each, line in lines)

    # --- the words "partitioned" and "offloaded"

    def partitioned(self, tier: Tier = "device") -> dict[str, SavedLayout]:
        """The `saved` lines of `recompute="partitioned"`, and of "offloaded" with the tier host.

        Every saved tensor is sliced along all axes that replicate it, by the first dim that can be sliced. Blocks with
        equal lines share one line with a pattern.
        """
        wanted: dict[str, dict[str, SavedLayout | None]] = {}
        for each in self.all:
            found = self._best(each, tier) if self.is_kept(each) else None
            wanted.setdefault(each.pattern, {})[each.name] = found
        lines: dict[str, SavedLayout] = {}
        for pattern, names in wanted.items():
            some = {name: line for name, line in names.items() if line is not None}
            line = self._shared(pattern, set(some.values()))
            lines |= some if line is None else {pattern: line}
        return lines

    def _shared(self, pattern: str, lines: set[SavedLayout]) -> SavedLayout | None:
        """A line that says the same as these for all tensors with a pattern; None if there is none.

        A line that slices also serves a tensor that no axis replicates, because it has no effect there.
        """
        slicing = {line for line in lines if any(state.kind == "S" for state in line.split)}
        found = slicing or lines
        if len(found) != 1:
            return None
        (line,) = found
        meant = (each for each in self.all if each.pattern == pattern)
        return line if all(self._allows(each, line) for each in meant) else None

    def _allows(self, each: BlockValue, line: SavedLayout) -> bool:
        dims = self.graph.tensors[each.tensor].dims
        return can_slice(dims, each.layout, line.of(each.layout), self.plan.mesh)

    def _best(self, each: BlockValue, tier: Tier) -> SavedLayout | None:
        line = self.sliced(each, self._source(each))
        if tier == "device":
            return line
        split = (R,) * len(self.plan.mesh.axes) if line is None else line.split
        return SavedLayout(split, tier)

    def _source(self, each: BlockValue) -> Callable[[int, list[State]], State]:
        """The choice of the slice that a tensor was gathered from, or the first one.

        A gather in pieces keeps its operand, not a slice of its result (`autopar.ops.decomposed`).
        """
        made = self.of.flow.produced.get(each.tensor, each.layout)
        return lambda axis, options: made[axis] if made[axis] in options else options[0]

    def sliced(self, each: BlockValue, choose: Callable[[int, list[State]], State]) -> SavedLayout | None:
        """A line for a tensor; None for no line.

        Args:
            each: the tensor.
            choose: picks the state for every axis that replicates the tensor, given the axis and its possible states.
        """
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
            state = choose(axis, options) if options else R
            line = SavedLayout((*line.split[:axis], state, *line.split[axis + 1 :]))
        return line if any(state != R for state in line.split) else None

    # --- what stays

    def is_kept(self, each: BlockValue) -> bool:
        """Whether a block keeps a tensor for backward, and nobody else the memory around it."""
        return self.of.is_apart(each) and self._stays(each)

    def _stays(self, each: BlockValue) -> bool:
        again, choices = each.block in self.of.again, self.of.choices[each.block]
        if isinstance(self.plan.recompute, Selection) and again:
            return each.memory in choices.kept(self.plan.recompute.names(each.path))
        kept = choices.tensors.get(each.memory)
        if again:
            return kept is None or kept.producer is None
        return kept is not None and kept.is_saved


def possible_lines(graph: Graph, plan: Plan) -> dict[str, SavedLayout]:
    """The saved lines of a plan that hold for this graph of the same model, which has other ops or sizes.

    Those of an input that is not there, or that cannot be sliced so, are left out.
    """
    values = SavedValues(graph, plan) if plan.saved else None
    return {name: line for name, line in plan.saved.items() if values is not None and values.holds(name)}
