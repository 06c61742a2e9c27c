"""For every block, the single ops that can be recomputed, and the memory that recomputing some of them frees."""

from __future__ import annotations

from functools import cached_property

from autopar.cost_model.items import WorkItem
from autopar.cost_model.memory import Selected
from autopar.ir.recompute import Selection
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.producers import Memory, Producer
from autopar.pipeline.recomputable import BlockChoices, block_choices, selected_in


class SelectableOps:
    """Which ops of a plan's blocks can be recomputed.

    Args:
        blocks: the plan's items by block.
    """

    def __init__(self, blocks: PricedBlocks) -> None:
        self.blocks = blocks

    @cached_property
    def choices(self) -> list[BlockChoices[Memory]]:
        """The ops of every block that can be recomputed."""
        seconds: dict[Producer, float] = {}
        for item in self.blocks.items:
            if item.phase == "forward":
                producer = item.of, item.moves
                seconds[producer] = seconds.get(producer, 0.0) + float(self._alone(item))
        graph, plan, flow = self.blocks.graph, self.blocks.plan, self.blocks.flow
        return block_choices(graph, plan, flow, unit=self.blocks.unit, seconds=seconds, size=self.blocks.bytes)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of the module of every block."""
        blocks = find_blocks(self.blocks.graph)
        return tuple(blocks[part.block].module for part in self.blocks.parts)

    @property
    def selectable(self) -> list[tuple[str, BlockChoices[Memory]]]:
        """Path and choices of every block that has ops which may be recomputed."""
        found = zip(self.paths, self.choices, self.blocks.repeating, strict=True)
        return [(path, choices) for path, choices, may_repeat in found if may_repeat]

    def _alone(self, item: WorkItem) -> float:
        """Seconds of an item without overlap; launching counts unless the host launches ahead of the device."""
        issued = 0.0 if self.blocks.software.runs_ahead else self.blocks.step.issue_seconds(item)
        return item.count * max(item.seconds, issued if item.kernels else 0.0)

    def selected(self, selection: Selection) -> Selected:
        """The ops and conversions that a selection recomputes."""
        return selected_in(self.choices, self.paths, self.blocks.repeating.tolist(), selection)

    def kept_with(self, selection: Selection) -> dict[Memory, list[int]]:
        """Memory saved for backward under a selection -> the blocks that save it."""
        found: dict[Memory, list[int]] = {}
        for unit, (path, choices) in enumerate(zip(self.paths, self.choices, strict=True)):
            names = selection.names(path) if self.blocks.repeating[unit] else ()
            for memory in choices.kept(names):
                found.setdefault(memory, []).append(unit)
        return found
