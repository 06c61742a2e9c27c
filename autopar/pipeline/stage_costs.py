"""The costs of all possible pipeline stages: of every stretch of neighbouring blocks.

Out of n blocks, n (n + 1) / 2 stages are possible, each with the blocks i to j - 1. Seconds add up, so that the seconds
of every stage are the difference of two values of one running sum over the blocks. Memory that several blocks share
(a tied embedding, a mask, the residual stream) counts once in every stage that has one of these blocks.

The items of a plan are attributed to blocks (`priced_blocks`), summed over stretches of blocks (`stretches`) as
seconds (`stage_seconds`), bytes (`stage_bytes`) and messages (`crossings`), and composed to a `StageTable` here.

[Note: recomputed blocks] A recomputed block keeps only the tensors that enter it. While backward recomputes it, all its
saved tensors exist (Chen et al. 2016). The recomputed blocks are the first ones of a stage (`autopar.ir.recompute`):
in a stage that begins with block i, the blocks i to e(i) - 1. The recomputed work is the sum over these blocks. The
saved memory is the sum of the inputs of these blocks, and of all saved tensors of the other blocks. Backward has
finished the other blocks before it recomputes, and has freed their tensors; only memory beyond theirs raises the peak.
Gathers of parameters do not count as recomputed work, because backward gathers parameters anyway. If single ops are
selected (`autopar.pipeline.recomputable`), every block that may be recomputed recomputes its selected ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypedDict

import numpy as np

from autopar.cost_model import Hardware, Link
from autopar.cost_model.items import FULL, TOUCHED, TrainingState, WorkItem
from autopar.cost_model.machines.kinds import stage_machines, together
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.memory import Selected
from autopar.cost_model.owners import has_lone_ops, owners_of_ops
from autopar.cost_model.steps.owned_step import OwnedStep
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, Pipeline, Plan
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.crossings import Crossings
from autopar.pipeline.parts import ends_of_repeats
from autopar.pipeline.priced_blocks import PricedBlocks
from autopar.pipeline.producers import Memory, Producer
from autopar.pipeline.recomputable import BlockChoices, block_choices, selected_in
from autopar.pipeline.saved_bytes import SavedBytes
from autopar.pipeline.simulation import StageCosts
from autopar.pipeline.split_seconds import SplitSeconds
from autopar.pipeline.stage_bytes import KEPT, StageBytes
from autopar.pipeline.stage_seconds import StageSeconds
from autopar.pipeline.stage_table import StageTable, WholeModel
from autopar.pipeline.stretches import Turn, sums


class _Figures(TypedDict):
    """Arguments that the tables of every machine share."""

    starts: Sequence[str] | None
    world: Mesh
    training_state: TrainingState
    software: Software


class _Halves(NamedTuple):
    """The figures of `StageTable` of a backward in two halves."""

    weight_seconds: np.ndarray
    split_seconds: np.ndarray
    late_bytes: np.ndarray


class StageTables:
    """The tables of a plan for any number of recomputed blocks.

    Where the pipeline ranks are of several kinds of machines, every kind has tables of its own (`on`). The seconds of
    these are then those of what the machines reach together, which bound the seconds of any cuts; messages between
    stages take those of the slowest link, `link_of_stages`.

    Args:
        graph: the captured model, at the size of one micro-batch.
        plan: plan with layouts and micro-batches; its cuts are ignored.
        hardware: machine whose figures give the prices.
        starts: name of the first op of every block; by default `block_starts(graph)`.
        world: mesh of all ranks, which decides the links; by default `plan.world_mesh`.
        training_state, software: see `autopar.cost_model`.

    Attributes:
        blocks: the plan's work (items) and memory (holdings), by block.
        memory: bytes of all possible stages.
        parts: the blocks of the whole model, in order.
        starts: name of the first op of every block.
        repetition: relation of captured blocks to the blocks of the whole model.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        hardware: Hardware,
        *,
        starts: Sequence[str] | None = None,
        world: Mesh | None = None,
        training_state: TrainingState = FULL,
        software: Software = AUTOPAR,
        link_of_stages: Link | None = None,
    ) -> None:
        world = world or plan.world_mesh
        machines = stage_machines(hardware, world)
        if has_lone_ops(plan):  # of ranks that work side by side, each may wait for the slowest
            machines = (hardware,) * len(machines)
        figures: _Figures = {"starts": starts, "world": world, "training_state": training_state, "software": software}
        self.blocks = PricedBlocks(graph, plan, together(machines), **figures)
        if link_of_stages is None and PIPELINE_AXIS in world.names:
            link_of_stages = software.on(hardware).link(world, world.index(PIPELINE_AXIS))
        self._of_ranks: tuple[StageTables, ...] = ()
        if any(machine != machines[0] for machine in machines):
            of_kinds = {
                machine: StageTables(graph, plan, machine, link_of_stages=link_of_stages, **figures)
                for machine in {*machines}
            }
            self._of_ranks = tuple(of_kinds[machine] for machine in machines)
        self.parts, self.starts = self.blocks.parts, self.blocks.starts
        self.repetition = self.blocks.repetition
        self._crossings = Crossings(self.blocks, link_of_stages)
        self.memory = StageBytes(self.blocks, self._crossings)
        self._seconds, self._selectable = StageSeconds(self.blocks), SelectableOps(self.blocks)
        self._found: dict[Recompute, StageTable] = {}
        self._wholes: dict[Recompute, WholeModel] = {}

    @property
    def repeating_blocks(self) -> int:
        """Number of blocks that may be recomputed."""
        return self.blocks.repeating_blocks

    @property
    def selectable(self) -> list[tuple[str, BlockChoices[Memory]]]:
        """For every block with recomputable ops, its path, and these ops with the tensors that it may keep."""
        return self._selectable.selectable

    def on(self, rank: int) -> StageTables:
        """The tables of stages on a pipeline rank."""
        return self._of_ranks[rank] if self._of_ranks else self

    def at(self, recompute: Recompute) -> StageTable:
        """The table of costs with this recomputation in every stage."""
        if recompute not in self._found:
            table = self._with(recompute, Turn.of(self._turns(recompute)))
            self._found[recompute] = replace(table, of_ranks=tuple(each.at(recompute) for each in self._of_ranks))
        return self._found[recompute]

    def costs(
        self, recompute: Recompute, cuts: Sequence[int], pipeline: Pipeline | None = None
    ) -> tuple[StageCosts, ...]:
        """Costs of all stages with this recomputation; ranks of a stage that run ops alone work side by side.

        Args:
            recompute: what every stage recomputes.
            cuts: index of the first block of every stage but the first.
            pipeline: what says which rank runs a stage, whatever its own cuts; None where all ranks have one machine.
        """
        found = self.at(recompute).stages(cuts, pipeline)
        return side_by_side(self.blocks, cuts, found) if has_lone_ops(self.blocks.plan) else found

    def whole(self, recompute: Recompute) -> WholeModel:
        """Figures of all blocks together, which bound the costs of any cuts; computed without the table."""
        if isinstance(recompute, Selection):
            return self.at(recompute).whole
        if recompute not in self._wholes:
            self._wholes[recompute] = self._whole(recompute)
        return self._wholes[recompute]

    def _whole(self, recompute: Recompute) -> WholeModel:
        turns, every = self._turns(recompute), np.arange(self.blocks.n + 1)
        whole = Turn.among(turns, every[:1, None], every[-1:])
        # All blocks as one stage, and then every block as one.
        stages = Turn.among(turns, np.append(0, every[:-1]), np.append(every[-1], every[1:]))
        forward, backward, _ = self._directions(recompute, stages)
        both, *blocks = (forward + backward).tolist()
        ((saved,),) = self._saved(recompute).saved(whole)
        # The slowest block may lie on the fastest machine.
        slowest = min((each.whole(recompute).block_seconds for each in self._of_ranks), default=max(blocks))
        return WholeModel(both, slowest, float(self._kept_bytes[0, -1]), float(saved), bool(self._of_ranks))

    def _turns(self, recompute: Recompute) -> list[int]:
        return [*ends_of_repeats(self.blocks.parts, recompute), self.blocks.n]

    def _saved(self, recompute: Recompute) -> SavedBytes:
        """The memory saved for backward with this recomputation."""
        if isinstance(recompute, Selection):
            return self.memory.saved_with(self._selectable.kept_with(recompute))
        return self.memory.saved_memory

    def _directions(self, recompute: Recompute, turn: Turn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of forward, of backward, and of the computation of backward."""
        time, recomputed = self._seconds, self._seconds.work.recomputed
        if isinstance(recompute, Selection):
            recomputed = time.recomputed_work(self._selectable.selected(recompute))
        return time.directions(turn, recomputed * self.blocks.repeating[:, None, None])

    def _with(self, recompute: Recompute, turn: Turn) -> StageTable:
        time, work = self._seconds, self._seconds.work
        forward, backward, computing = self._directions(recompute, turn)
        saved = self._saved(recompute)
        saved_bytes = saved.saved(turn)
        sent, gradients = self._crossings.sent
        halves = self._halves(recompute, backward, saved_bytes, gradients)
        return StageTable(
            starts=self.starts,
            recompute=recompute,
            repeating=tuple(map(bool, self.blocks.repeating)),
            forward_seconds=forward,
            backward_seconds=backward,
            weight_seconds=halves.weight_seconds,
            split_seconds=halves.split_seconds,
            once_seconds=time.once(sums(work.once), computing) + self._optimizer_seconds,
            saved_bytes=saved_bytes,
            late_bytes=halves.late_bytes,
            kept_bytes=self._kept_bytes,
            version_bytes=self._version_bytes,
            transient_bytes=saved.transient(turn),
            sent_bytes=sent,
            gradient_bytes=gradients,
            send_seconds=self._crossings.send_seconds(sent),
            gradient_seconds=self._crossings.send_seconds(gradients),
        )

    def _halves(
        self, recompute: Recompute, backward: np.ndarray, saved_bytes: np.ndarray, gradients: np.ndarray
    ) -> _Halves:
        """Costs of a backward in two halves; on stages that recompute, the runtime runs it whole.

        Args:
            recompute: what every stage recomputes.
            backward: seconds of a whole backward of every stage.
            saved_bytes: saved activations of every stage.
            gradients: bytes of the gradient that comes back at every cut.
        """
        split, late = sums(self._seconds.work.split), saved_bytes + sums(self._arrived_bytes)
        weights = np.minimum(sums(self._seconds.work.weights), backward + split)
        # The first stage's input needs no gradient, so its whole backward runs as the second half; until then the
        # gradient that has come back is kept.
        weights[0], split[0], late[0] = backward[0], 0.0, saved_bytes[0] + gradients
        is_whole = self._runs_whole(recompute)
        return _Halves(*(np.where(is_whole, 0.0, each) for each in (weights, split, late)))

    def _runs_whole(self, recompute: Recompute) -> np.ndarray:
        """Whether a stage runs both halves of a backward as one, as `Runner` does if no executor compiles its graph."""
        plan, found = self.blocks.plan, np.zeros(self.blocks.n)
        if recompute != "none":
            found += self.blocks.repeating
        for each in self.blocks.slices:
            found[each.block] += 1
        return (sums(found) > 0) | bool(plan.decomposed or has_lone_ops(plan))

    @cached_property
    def _arrived_bytes(self) -> np.ndarray:
        """Bytes of the gradients that ops of a block hold between both halves of a backward, of shape `(n,)`."""
        blocks, found = self.blocks, np.zeros(self.blocks.n)
        split = SplitSeconds(blocks.graph, blocks.hardware)
        for op in filter(split.runs_in_both, blocks.graph.ops):
            results = zip(op.results, blocks.flow.results[op.name], strict=True)
            held = sum(blocks.bytes(each) for each in results if blocks.graph.tensors[each[0]].needs_grad)
            found[blocks.all_of(blocks.unit[op.name])] += held
        return found

    @cached_property
    def _kept_bytes(self) -> np.ndarray:
        """Bytes that every possible stage holds during the whole step."""
        return self.memory.held(KEPT)

    @cached_property
    def _version_bytes(self) -> np.ndarray:
        """Bytes of one more version of the parameters of every possible stage."""
        return self.memory.held({"parameters": 1})

    @cached_property
    def _optimizer_seconds(self) -> np.ndarray:
        """Seconds of the optimizer's update of every possible stage; see `autopar.cost_model.steps.step`."""
        rate = self.blocks.hardware.updates_per_second
        tiers = dict.fromkeys(("device", *(h.tier for rank in self.blocks.holdings_of_ranks for h in rank)))
        touched = {tier: self.memory.held(TOUCHED, tier, stored_alone=True) for tier in tiers}
        return np.asarray(sum(size / rate(tier) for tier, size in touched.items()))


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


def side_by_side(blocks: PricedBlocks, cuts: Sequence[int], costs: Sequence[StageCosts]) -> tuple[StageCosts, ...]:
    """The costs of stages whose ranks work side by side (choices such as `@1`), given those of ranks in turn.

    Forward and backward are each a list of calls on the clocks of the ranks (`autopar.cost_model.steps.owned_step`),
    and take the fraction of the table's seconds that the last clock is of the sum.

    Args:
        blocks: the plan's items by block.
        cuts: the first block of every stage but the first.
        costs: costs of every stage for one micro-batch.
    """
    owned, order = _owned_step(blocks), blocks.pricer.in_order()
    found, edges = [], itertools.pairwise((0, *cuts, blocks.n))
    for edge, cost in zip(edges, costs, strict=True):
        own = _of_stage(blocks, order, edge)
        forward = _fraction(owned, [i for i in own if i.phase == "forward"])
        backward = _fraction(owned, [i for i in own if i.phase != "forward"])
        found.append(
            replace(
                cost, forward_seconds=forward * cost.forward_seconds, backward_seconds=backward * cost.backward_seconds
            )
        )
    return tuple(found)


def _owned_step(blocks: PricedBlocks) -> OwnedStep:
    """The work of a micro-batch of all stages on every rank of a stage's mesh, without memory."""
    plan = blocks.plan
    step = replace(blocks.step, items=tuple(blocks.items), _sums={})
    ranks = {position: () for position in owners_of_ops(plan)}
    return OwnedStep.of(step, plan.mesh.names, (), ranks)


def _of_stage(blocks: PricedBlocks, order: Sequence[WorkItem], edge: tuple[int, int]) -> list[WorkItem]:
    """The items of a stage, each with the part of its count that is of the stage's blocks."""
    found = []
    for item in order:
        rows, share = blocks.rows_of(item)
        count = sum(edge[0] <= row < edge[1] for row in rows)
        if count:
            found.append(replace(item, count=item.count * share * count))
    return found


def _fraction(owned: OwnedStep, order: Sequence[WorkItem]) -> float:
    """The duration of some calls on ranks that work side by side, as a part of that of ranks in turn."""
    in_turn = owned.in_turn_seconds(order)
    return owned.scheduled(order).makespan_seconds / in_turn if in_turn else 1.0
