"""What the stages of a pipeline cost: every stretch of blocks, priced at once.

With n blocks there are n (n + 1) / 2 stages to choose from, from block i up to block j. Work adds up, so
that the seconds of all of them are differences of one running sum over the blocks; what several blocks
share (a tied embedding, a mask, the residual stream) is counted once in every stage that has any of them.

The items of a plan are attributed to blocks (`priced_blocks`), summed over stretches of blocks (`stretches`) as
seconds (`stage_seconds`), bytes (`stage_bytes`) and messages (`crossings`), and composed to a `StageTable` here.

[Note: recomputed blocks] A recomputed block keeps only the tensors that enter it, and has all its memory while
it is recomputed (Chen et al. 2016). The recomputed blocks are the first ones of a stage (`autopar.ir.recompute`):
in the stage i .. j they are the blocks up to a block e(i). The recomputed work is the sum from i to e(i); the kept
memory is the sum of entering tensors up to e(i) and of all saved tensors from there on. When these blocks are
recomputed, the blocks after e(i) have run backward, so only memory in excess of theirs is new. A gathered
parameter is not gathered once more: backward gathers it anyway. Where single ops are selected
(`autopar.pipeline.recomputable`), every block that may repeat recomputes its selected ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.cost_model import Hardware
from autopar.cost_model.items import FULL, TOUCHED, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.ir import Graph, Mesh, Plan
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.crossings import Crossings
from autopar.pipeline.parts import block_starts, end_of_repeats
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.recomputable import BlockChoices, Memory
from autopar.pipeline.selectable import SelectableOps
from autopar.pipeline.simulation import StageCosts
from autopar.pipeline.stage_bytes import StageBytes
from autopar.pipeline.stage_seconds import StageSeconds
from autopar.pipeline.stage_table import StageTable
from autopar.pipeline.stretches import Turn, sums


def stage_table(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    starts: Sequence[str] | None = None,
    world: Mesh | None = None,
    training_state: TrainingState = FULL,
    software: Software = AUTOPAR,
) -> StageTable:
    """Prices all stages of a plan.

    Args:
        graph: the captured model, at the size of one micro-batch.
        plan: gives layouts, micro-batches and recomputation; its own cuts are not looked at.
        hardware: what the prices are made of.
        starts: where blocks begin, the first op included; by default `block_starts(graph)`.
        world: the mesh of all ranks, for the links; by default `plan.world_mesh`.
        training_state, software: see `autopar.cost_model`.
    """
    tables = StageTables(
        graph,
        plan,
        hardware,
        starts=starts,
        world=world,
        training_state=training_state,
        software=software,
    )
    return tables.at(plan.recompute)


def costs_of_stages(
    graph: Graph,
    plan: Plan,
    hardware: Hardware,
    *,
    training_state: TrainingState = FULL,
    software: Software = AUTOPAR,
) -> tuple[StageCosts, ...]:
    """What the stages of a plan cost, wherever it is cut; one stage for a plan without a pipeline."""
    cuts = plan.pipeline.cuts if plan.pipeline else ()
    places = {op.name: i for i, op in enumerate(graph.ops)}
    starts = sorted({*block_starts(graph), *cuts}, key=places.__getitem__)
    table = stage_table(
        graph, plan, hardware, starts=starts, training_state=training_state, software=software
    )
    return table.stages([starts.index(name) for name in cuts])


class StageTables:
    """The tables of a plan for any number of recomputed blocks; see `stage_table` for the arguments.

    Attributes:
        blocks: the plan's items and holdings by block.
        memory: the memory of its stages.
        parts: the blocks of the whole model, in order.
        starts: name of the first op of every block.
        repetition: the blocks that a captured block stands for.
    """

    def __init__(
        self, graph: Graph, plan: Plan, hardware: Hardware, *, starts: Sequence[str] | None = None,
        world: Mesh | None = None, training_state: TrainingState = FULL, software: Software = AUTOPAR,
    ) -> None:  # fmt: skip
        self.blocks = PricedBlocks(
            graph, plan, hardware, starts=starts, world=world,
            training_state=training_state, software=software,
        )  # fmt: skip
        self.parts, self.starts = self.blocks.parts, self.blocks.starts
        self.repetition = self.blocks.repetition
        self._crossings = Crossings(self.blocks)
        self.memory = StageBytes(self.blocks, self._crossings)
        self._seconds, self._selectable = StageSeconds(self.blocks), SelectableOps(self.blocks)
        self._found: dict[Recompute, StageTable] = {}

    @property
    def repeating_blocks(self) -> int:
        """Number of blocks that may be recomputed."""
        return self.blocks.repeating_blocks

    @property
    def selectable(self) -> list[tuple[str, BlockChoices[Memory]]]:
        """Path and choices of every block of which ops may be recomputed."""
        return self._selectable.selectable

    def at(self, recompute: Recompute) -> StageTable:
        """The table where so many blocks of every stage are recomputed."""
        if recompute not in self._found:
            blocks = self.blocks
            ends = [end_of_repeats(blocks.parts, i, recompute) for i in range(blocks.n)]
            self._found[recompute] = self._with(recompute, Turn.of([*ends, blocks.n]))
        return self._found[recompute]

    def _with(self, recompute: Recompute, turn: Turn) -> StageTable:
        time, memory = self._seconds, self.memory
        work, recomputed, memories = time.work, time.work.recomputed, memory.memories
        if isinstance(recompute, Selection):
            memories = memory.memories_with(self._selectable.kept_with(recompute))
            recomputed = time.recomputed_work(self._selectable.selected(recompute))
        again = turn.first(sums(recomputed * self.blocks.repeating[:, None, None]))
        second = sums(work.backward) + again
        forward, backward = time.directions(sums(work.forward), second)
        sent, gradients = self._crossings.sent
        return StageTable(
            starts=self.starts,
            recompute=recompute,
            repeating=tuple(map(bool, self.blocks.repeating)),
            forward_seconds=forward,
            backward_seconds=backward,
            weight_seconds=np.minimum(sums(work.weights), backward),
            once_seconds=time.once(sums(work.once), second) + self._optimizer_seconds,
            saved_bytes=memory.saved(turn, memories),
            kept_bytes=self._kept_bytes,
            version_bytes=self.memory.held({"parameters": 1}),
            transient_bytes=memory.transient(
                turn, memories, keeps_part=isinstance(recompute, Selection)
            ),
            sent_bytes=sent,
            gradient_bytes=gradients,
            send_seconds=self._crossings.send_seconds(sent),
            gradient_seconds=self._crossings.send_seconds(gradients),
        )

    @cached_property
    def _kept_bytes(self) -> np.ndarray:
        """Bytes that a stage holds all the time."""
        return self.memory.held({"parameters": 1, "gradients": 1, "optimizer": 1, "buffers": 1})

    @cached_property
    def _optimizer_seconds(self) -> np.ndarray:
        """Seconds of an update in every tier; see `autopar.cost_model.step`."""
        rate = self.blocks.hardware.updates_per_second
        tiers = dict.fromkeys(("device", *(h.tier for h in self.blocks.holdings)))
        touched = {tier: self.memory.held(TOUCHED, tier, stored_alone=True) for tier in tiers}
        return np.asarray(sum(size / rate(tier) for tier, size in touched.items()))
