"""What the stages of a pipeline cost: every stretch of blocks, priced at once.

With n blocks there are n (n + 1) / 2 stages to choose from, from block i up to block j. Work adds up, so
that the seconds of all of them are differences of one running sum over the blocks; what several blocks
share (a tied embedding, a mask, the residual stream) is counted once in every stage that has any of them.

A stage holds of every micro-batch in flight what its ops keep for backward, and, because
`torch.distributed.pipelining` does, the values that it received and sent.

[Note: blocks that run again] Such a block keeps only what enters it, and is there in full while it is
recomputed (Chen et al. 2016). These blocks are the first ones of a stage (`autopar.ir.recompute`), in the stage
i .. j those up to a block e(i): recomputed work is the sum from i to e(i), and what is kept is the sum of one
kind up to e(i) and of the other from there on. When they are recomputed, the blocks after e(i) have run
backward, so of their memory only what exceeds that of the later blocks is new. A gathered parameter is not
gathered once more: backward gathers it anyway. Where ops are selected (`autopar.pipeline.recomputable`), every
block that may repeat recomputes its part.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autopar.cost_model import Hardware, Link, Sizes, collective_seconds, keeps
from autopar.cost_model.compute import is_product, memory_seconds
from autopar.cost_model.items import COMPUTE, FULL, Item, TrainingState
from autopar.cost_model.memory import Selected
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.software import AUTOPAR, Software
from autopar.cost_model.step import REGIONS, Run, Step
from autopar.ir import PIPELINE_AXIS, Graph, Mesh, Op, Plan
from autopar.ir.recompute import Recompute, Selection
from autopar.pipeline.blocks import find_blocks
from autopar.pipeline.parts import block_starts, end_of_repeats, find_parts
from autopar.pipeline.recomputable import (
    BlockChoices,
    Maker,
    Memory,
    block_choices,
    selected_in,
)
from autopar.pipeline.repetition import Places, Repetition
from autopar.pipeline.simulation import StageCosts

# What a block does in one direction, as columns: work, communication of parameters and gradients, that of
# activations, op by op the wait for the host, and its sum where the host runs ahead.
_COMPUTE, _STORED, _ACTIVATIONS, _WAITS, _AHEAD = range(5)


@dataclass(frozen=True)
class StageTable:
    """Figures of the stage with blocks `i` up to `j`, at `[i, j]` of arrays of shape `(n + 1, n + 1)`.

    Attributes:
        starts: the ops with which the blocks begin.
        recompute: how many of a stage's blocks run again in backward.
        repeating: for every block whether it may.
        forward_seconds, backward_seconds: time of one micro-batch that nothing hides.
        weight_seconds: the part of backward that makes gradients of parameters.
        once_seconds: gathers, reductions and the optimizer, once a step.
        saved_bytes: saved activations of each micro-batch in flight.
        kept_bytes: parameters, gradients, optimizer states and buffers.
        transient_bytes: there for a moment, of one block at a time.
        sent_bytes, gradient_bytes: what crosses into block k, and its gradient, at `[k]` of shape `(n + 1,)`.
        send_seconds, gradient_seconds: the same in time.
    """

    starts: tuple[str, ...]
    recompute: Recompute
    repeating: tuple[bool, ...]
    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    weight_seconds: np.ndarray
    once_seconds: np.ndarray
    saved_bytes: np.ndarray
    kept_bytes: np.ndarray
    transient_bytes: np.ndarray
    sent_bytes: np.ndarray
    gradient_bytes: np.ndarray
    send_seconds: np.ndarray
    gradient_seconds: np.ndarray

    @property
    def blocks(self) -> int:
        return len(self.starts)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Of a micro-batch: forward, backward and sending both ways; inf where `i >= j`."""
        whole = self.forward_seconds + self.backward_seconds
        whole = whole + self.send_seconds[None, :] + self.gradient_seconds[:, None]
        begin, end = np.indices(whole.shape)
        return np.where(begin < end, whole, np.inf)

    def most_repeating(self, cuts: Sequence[int]) -> int:
        """The largest number of blocks of a stage that may run again."""
        edges = (0, *cuts, self.blocks)
        return max(sum(self.repeating[i:j]) for i, j in itertools.pairwise(edges))

    def stage(self, begin: int, end: int) -> StageCosts:
        """The stage with blocks `begin` up to `end`, as the event simulator takes it."""
        at = begin, end
        return StageCosts(
            forward_seconds=float(self.forward_seconds[at]),
            backward_seconds=float(self.backward_seconds[at]),
            weight_seconds=float(self.weight_seconds[at]),
            saved_bytes=float(self.saved_bytes[at]),
            working_bytes=float(self.transient_bytes[at]),
            kept_bytes=float(self.kept_bytes[at]),
            send_forward_seconds=float(self.send_seconds[end]),
            send_backward_seconds=float(self.gradient_seconds[begin]),
        )

    def stages(self, cuts: Sequence[int]) -> tuple[StageCosts, ...]:
        """All stages, given the blocks with which those after the first begin."""
        edges = (0, *cuts, self.blocks)
        return tuple(self.stage(i, j) for i, j in itertools.pairwise(edges))


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


class _Staying(NamedTuple):
    """Memory that stays for backward, in blocks of the whole model.

    Attributes:
        bytes: size.
        kept: blocks that keep it.
        entering: blocks that keep it, or that it enters and that run again.
        spans: the block that makes it and the last that uses it, where it crosses between blocks.
    """

    bytes: float
    kept: tuple[int, ...]
    entering: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class StageTables:
    """The tables of a plan for any number of blocks that run again; see `stage_table`.

    `unit` is the captured part that an op belongs to; a captured part of a middle layer stands for several parts
    of the whole model, which `autopar.pipeline.repetition` tells.
    """

    def __init__(
        self, graph: Graph, plan: Plan, hardware: Hardware, *, starts: Sequence[str] | None = None,
        world: Mesh | None = None, training_state: TrainingState = FULL, software: Software = AUTOPAR,
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.software = graph, plan, software
        self.hardware, self.world = software.on(hardware), world or plan.world_mesh
        self.parts = find_parts(graph, starts or block_starts(graph))
        self.starts = tuple(part.start for part in self.parts)
        self.repetition = Repetition.of(graph)
        places = {op.name: i for i, op in enumerate(graph.ops)}
        begins = (
            [places[block.start] for block in self.repetition.blocks]
            if self.repetition.groups
            else [places[name] for name in self.starts]
        )
        self.unit = {name: bisect.bisect_right(begins, i) - 1 for name, i in places.items()}
        self.repeating = np.array([part.may_repeat for part in self.parts])
        self.unit_repeats = {part.captured: part.may_repeat for part in self.parts}
        self.n, self.units = len(self.parts), len(begins)
        self.uses = self._uses()
        self.pricer = Pricer(
            graph, plan, sizes=Sizes(plan.mesh), hardware=self.hardware, training_state=training_state,
            links=[self._link(axis) for axis in plan.mesh.names], blocks=self.unit,
        )  # fmt: skip
        self.flow, self.sizes = self.pricer.flow, self.pricer.sizes
        self.items = list(self.pricer.items())
        self.holdings = list(self.pricer.holdings())
        self.step = Step((), (), Run(plan.micro_batches), self.hardware, software)
        self._found: dict[Recompute, StageTable] = {}

    @property
    def repeating_blocks(self) -> int:
        """How many blocks may run again."""
        return len({part.block for part in self.parts if part.may_repeat})

    def at(self, recompute: Recompute) -> StageTable:
        """The table where so many blocks of every stage run again."""
        if recompute not in self._found:
            ends = [end_of_repeats(self.parts, i, recompute) for i in range(self.n)]
            self._found[recompute] = self._with(recompute, _Turn.of([*ends, self.n]))
        return self._found[recompute]

    def _with(self, recompute: Recompute, turn: _Turn) -> StageTable:
        work = self._work
        selection = recompute if isinstance(recompute, Selection) else None
        memories = self._memories
        if selection:
            memories = self._memories_with(self._kept_with(selection))
        recomputed = self._recomputed_work(selection) if selection else work.recomputed
        again = turn.first(_stretches(recomputed * self.repeating[:, None, None]))
        second = _stretches(work.backward) + again
        forward, backward = self._seconds(_stretches(work.forward), second)
        sent, gradients = self._sent
        return StageTable(
            starts=self.starts,
            recompute=recompute,
            repeating=tuple(map(bool, self.repeating)),
            forward_seconds=forward,
            backward_seconds=backward,
            weight_seconds=np.minimum(_stretches(work.weights), backward),
            once_seconds=self._once_seconds(_stretches(work.once), second[..., _COMPUTE].sum(-1))
            + self._optimizer_seconds,
            saved_bytes=self._saved(turn, memories),
            kept_bytes=self.held({"parameters": 1, "gradients": 1, "optimizer": 1, "buffers": 1}),
            transient_bytes=self._transient(turn, memories, keeps_part=selection is not None),
            sent_bytes=sent,
            gradient_bytes=gradients,
            send_seconds=self._send_seconds(sent),
            gradient_seconds=self._send_seconds(gradients),
        )  # fmt: skip

    def _link(self, axis: str) -> Link:
        """Of an axis among all ranks; a stage of one rank has an axis that the world has not."""
        names = self.world.names
        if axis not in names:
            return self.hardware.axis_link(1, 1, self.world.size)
        return self.hardware.link(self.world, names.index(axis))

    def _uses(self) -> dict[str, list[int]]:
        """Tensor -> the captured parts whose ops take it, ascending."""
        found: dict[str, list[int]] = {}
        for op in self.graph.ops:
            for name in op.operands:
                at = found.setdefault(name, [])
                if not at or at[-1] != self.unit[op.name]:
                    at.append(self.unit[op.name])
        return found

    # --- time

    @cached_property
    def _work(self) -> _Work:
        work = _Work.nothing(self.n)
        for item in self.items:
            (rows, share), region = self.rows_of(item), REGIONS.index(item.region)
            if item.phase in ("gather", "reduce") and not item.every_micro_batch:
                once = share * item.count * item.seconds
                work.once[rows, int(item.phase == "reduce")] += once
                continue
            row = share * self._row(item)
            (work.forward if item.phase == "forward" else work.backward)[rows, region] += row
            work.recomputed[rows, region] += item.recomputed * row
            if item.phase != "forward":
                weights = self._weight_share(item)
                work.weights[rows] += share * item.count * item.seconds * weights
        return work

    # --- recomputation of single ops

    @cached_property
    def choices(self) -> list[BlockChoices[Memory]]:
        """What can be recomputed of every block."""
        seconds: dict[Maker, float] = {}
        for item in self.items:
            if item.phase == "forward":
                maker = item.of, item.moves
                seconds[maker] = seconds.get(maker, 0.0) + float(self._alone(item))
        return block_choices(
            self.graph, self.plan, self.flow, unit=self.unit, seconds=seconds, size=self._bytes
        )

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of the module of every block."""
        blocks = find_blocks(self.graph)
        return tuple(blocks[part.block].module for part in self.parts)

    @property
    def selectable(self) -> list[tuple[str, BlockChoices[Memory]]]:
        """Path and choices of every block of which ops may be recomputed."""
        found = zip(self.paths, self.choices, self.repeating, strict=True)
        return [(path, choices) for path, choices, may_repeat in found if may_repeat]

    def _alone(self, item: Item) -> float:
        """Seconds of an item that nothing hides; where the host runs ahead, it waits for nothing."""
        issued = 0.0 if self.software.runs_ahead else self.step.issue_seconds(item)
        return item.count * max(item.seconds, issued if item.kernels else 0.0)

    def _recomputed_work(self, selection: Selection) -> np.ndarray:
        """Work of every block that is recomputed, of the shape of `_Work.recomputed`."""
        selected = self._selected(selection)
        work = np.zeros_like(self._work.recomputed)
        for item in self.items:
            if selected.repeats(item.of, item.moves, item.phase, item.carries):
                rows, share = self.rows_of(item)
                work[rows, REGIONS.index(item.region)] += share * self._row(item)
        return work

    def _selected(self, selection: Selection) -> Selected:
        return selected_in(self.choices, self.paths, self.repeating.tolist(), selection)

    def _kept_with(self, selection: Selection) -> dict[Memory, list[int]]:
        """The memory that stays for backward -> the blocks for which it does."""
        found: dict[Memory, list[int]] = {}
        for unit, (path, choices) in enumerate(zip(self.paths, self.choices, strict=True)):
            names = selection.names(path) if self.repeating[unit] else ()
            for memory in choices.kept(names):
                found.setdefault(memory, []).append(unit)
        return found

    def rows_of(self, item: Item) -> tuple[list[int], float]:
        """The blocks that an item stands in, and the part of its count in each."""
        if item.moves:
            unit = self.unit.get(item.of, self.units - 1)  # or for the end of the graph
            found = self.spread(item.moves, {*self.uses.get(item.moves, ()), unit})
            return [min(at[unit]) for at in found if at.get(unit)], 1 / self._times(item.moves)
        if item.of in self.unit:
            return self._all_of(self.unit[item.of]), 1 / self._times(item.of)
        if item.of in self.graph.parameters:
            units = self.uses.get(self.graph.parameters[item.of], [0])
            found = self.spread(self.graph.parameters[item.of], units)
            return [min(at[units[0]]) for at in found], 1 / self._times(item.of)
        return [self.n - 1], 1.0  # the end of the graph

    # --- what a captured layer stands for

    def _times(self, name: str) -> int:
        """How many an op, tensor or parameter stands for."""
        return self.graph.stands_for.get(name, 1)

    def _all_of(self, unit: int) -> list[int]:
        """The blocks that a captured part stands for."""
        return list(self.repetition.all_of(unit)) if self.repetition.groups else [unit]

    def spread(self, name: str, units: Collection[int]) -> list[Places]:
        """Where the tensors lie that a captured tensor stands for; see `Repetition.spread`."""
        if not self.repetition.groups:
            return [{unit: (unit,) for unit in units}]
        maker = self.graph.producer.get(name)
        made = self.unit[maker.name] if maker else None
        owner = min(units) if maker is None and name in self._owned else None
        return self.repetition.spread(made, owner, units)

    @cached_property
    def _owned(self) -> frozenset[str]:
        """Parameters and buffers, as tensors, of layers that stand for several."""
        graph = self.graph
        leaves = {**graph.parameters, **graph.buffers}
        return frozenset(
            tensor
            for name, tensor in leaves.items()
            if (place := graph.stack_of(name)) and place[1] == place[0].middle
        )

    def _row(self, item: Item) -> np.ndarray:
        """An item in the columns of a block's work."""
        row = np.zeros(5)
        seconds = item.count * item.seconds
        late = item.count * (self.step.issue_seconds(item) - item.seconds)
        if item.resource == COMPUTE:
            row[_COMPUTE] = seconds
        else:
            row[_ACTIVATIONS if item.carries == "activation" else _STORED] = seconds
        row[_WAITS] = max(0.0, late) if item.kernels else 0.0
        row[_AHEAD] = late
        return row

    def _weight_share(self, item: Item) -> float:
        """The part of an item of backward that no other stage waits for."""
        op = self.graph.by_name.get(item.of)
        if op is None or item.carries == "gradient":
            return 1.0
        if item.resource != COMPUTE or not (is_product(op) or op.kind == "aten.embedding"):
            return 0.0
        wanted = [n for n in op.operands if self.graph.tensors[n].needs_grad]
        return sum(name in self._of_parameters for name in wanted) / max(1, len(wanted))

    @cached_property
    def _of_parameters(self) -> frozenset[str]:
        """Parameters, and casts and views of them."""
        found = set(self.graph.parameters.values())
        for op in self.graph.ops:
            if op.operands and found.issuperset(op.operands):
                found.update(op.results)
        return frozenset(found)

    def _seconds(self, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of both directions, each given as work of shape `(n + 1, n + 1, 3, 5)`.

        What is hidden is found region by region for both together, as `autopar.cost_model.step` does
        it, and attributed to each direction by its part of the communication.
        """
        software, both = self.software, forward + backward
        compute, stored, activations, _, ahead = np.moveaxis(both, -1, 0)
        own = software.hides * np.minimum(stored, compute)
        other = software.hides_activations * np.minimum(activations, compute)
        late = np.maximum(0, ahead + own + other)
        device = both[..., :3].sum(-1)

        def seconds(work: np.ndarray) -> np.ndarray:
            hidden = own * _share(work[..., _STORED], stored)
            hidden = hidden + other * _share(work[..., _ACTIVATIONS], activations)
            busy = work[..., :3].sum(-1)
            waits = late * _share(busy, device) if software.runs_ahead else work[..., _WAITS]
            return np.asarray((busy - hidden + waits).sum(-1))

        return seconds(forward), seconds(backward)

    def _once_seconds(self, once: np.ndarray, backward: np.ndarray) -> np.ndarray:
        gathers, reductions = np.moveaxis(once, -1, 0)
        return gathers + reductions - self.software.hides * np.minimum(reductions, backward)

    @cached_property
    def _optimizer_seconds(self) -> np.ndarray:
        """Adam reads and writes its states and parameters; see `autopar.cost_model.step`."""
        touched = self.held({"optimizer": 2, "gradients": 3, "parameters": 2})
        return np.asarray(memory_seconds(touched, self.hardware))

    # --- memory

    def held(self, weights: Mapping[str, float]) -> np.ndarray:
        """Bytes of parameters and what belongs to them, each in all stages that use it.

        Args:
            weights: kind of a holding -> how many times it counts.
        """
        held: dict[str, float] = {}
        for h in self.holdings:
            if h.kind in weights:
                name = self.graph.parameters.get(h.of, h.of)
                held[name] = held.get(name, 0) + weights[h.kind] * h.bytes
        return self._covered(
            (size / len(spread), sorted(itertools.chain.from_iterable(at.values())))
            for name, size in held.items()
            for spread in [self.spread(name, self.uses.get(name, [0]))]
            for at in spread
        )

    def _covered(self, shared: Iterable[tuple[float, Sequence[int]]]) -> np.ndarray:
        """Bytes of what counts once in every stage that has one of some blocks."""
        single, total = np.zeros(self.n), np.zeros((self.n + 1, self.n + 1))
        sums: dict[tuple[int, ...], float] = {}
        for size, units in shared:
            sums[tuple(units)] = sums.get(tuple(units), 0.0) + size
        for units, size in sums.items():
            if len(units) == 1:
                single[units[0]] += size
            else:
                total += size * _has(units, self.n)
        return total + _stretches(single)

    def _saved(self, turn: _Turn, memories: Sequence[_Staying]) -> np.ndarray:
        """What stays of a micro-batch: what ops keep, and what a stage received and sent."""
        once, again = np.zeros(self.n), np.zeros(self.n)
        total = np.zeros((self.n + 1, self.n + 1))
        for each in _alike(memories):
            if not each.spans and len({*each.kept, *each.entering}) == 1:
                # then it is in one sum or in the other
                once[list(each.kept)] += each.bytes
                again[list(each.entering)] += each.bytes
                continue
            there = turn.first(_has(each.entering, self.n)) | turn.then(_has(each.kept, self.n))
            for span in each.spans:
                there |= _carries(*span, self.n)
            total += each.bytes * there
        return total + turn.first(_stretches(again)) + turn.then(_stretches(once))

    @cached_property
    def _memories(self) -> list[_Staying]:
        """All memory that stays for backward, or crosses between blocks; whole blocks are recomputed."""
        return self._memories_with(self._staying(self.unit_repeats))

    def _memories_with(self, entering: Mapping[Memory, Sequence[int]]) -> list[_Staying]:
        """The same, given what stays of blocks that recompute something, with the captured parts."""
        kept, wires = self._staying({}), self._wires
        found = []
        for at in {**kept, **entering, **wires}:
            size, spans = self._bytes(at), wires.get(at, [])
            units = {*kept.get(at, ()), *entering.get(at, ())}
            units.update(itertools.chain.from_iterable(spans))
            for places in self.spread(at[0], units | {*self.uses.get(at[0], ())}):
                found.append(
                    _Staying(
                        size,
                        _places(places, kept.get(at, ())),
                        _places(places, entering.get(at, ())),
                        tuple(
                            (min(places[made]), max(places[last]))
                            for made, last in spans
                            if places.get(made) and places.get(last)
                        ),
                    )
                )
        return found

    @cached_property
    def _wires(self) -> dict[Memory, list[tuple[int, int]]]:
        """The memory of what crosses -> from which captured part to which."""
        found: dict[Memory, list[tuple[int, int]]] = {}
        for name, span in self._crossings.items():
            at = self.flow.saved.memory(name, self.flow.produced[name])
            found.setdefault(at, []).append(span)
        return found

    def _staying(self, again: Mapping[int, bool]) -> dict[Memory, list[int]]:
        """The memory that stays for backward -> the captured parts for which it does.

        Of parts that run `again` only what enters them stays.
        """
        stored = {*self.graph.parameters.values(), *self.graph.buffers.values()}
        found: dict[Memory, list[int]] = {}
        for op in self.graph.ops:
            unit = self.unit[op.name]
            names = (
                self._from_outside(op) if again.get(unit) else op.saved if self._keeps(op) else ()
            )
            layouts = (*self.flow.operands[op.name], *self.flow.results[op.name])
            for name, layout in zip((*op.operands, *op.results), layouts, strict=True):
                if name in names and self.flow.saved.root(name) not in stored:
                    units = found.setdefault(self.flow.saved.memory(name, layout), [])
                    if unit not in units:
                        units.append(unit)
        return found

    def _keeps(self, op: Op) -> bool:
        return keeps(op, self.graph.tensors)

    def _from_outside(self, op: Op) -> tuple[str, ...]:
        """Operands that come from outside of the op's block."""
        makers = {name: self.graph.producer.get(name) for name in op.operands}
        unit = self.unit[op.name]
        return tuple(
            n for n, made in makers.items() if made is None or self.unit[made.name] != unit
        )

    def _bytes(self, memory: Memory) -> float:
        name, layout = memory
        return float(self.sizes.bytes(self.graph.tensors[name], layout))

    def _transient(
        self, turn: _Turn, memories: Sequence[_Staying], *, keeps_part: bool
    ) -> np.ndarray:
        """The loss or gathered parameters with their gradients, and what runs again, of the largest block.

        Of what runs again no more counts than goes beyond what the blocks behind have given back.
        """
        gathered, losses = np.zeros(self.n), np.zeros(self.n)
        again, alone = np.zeros(self.n), np.zeros(self.n)
        for h in self.holdings:
            if h.kind == "gathered":
                rows = self._all_of(self.unit.get(h.of, self.units - 1))
                gathered[rows] += h.bytes
            elif h.kind == "working":
                losses[self._all_of(self.unit[h.of])] += h.bytes / self._times(h.of)
        for each in memories:
            if each.kept:
                stays = keeps_part and each.kept[0] in each.entering
                again[each.kept[0]] += 0 if stays else each.bytes
                if len(each.kept) == 1 and not each.spans:
                    alone[each.kept[0]] += each.bytes
        moment = np.maximum(losses, 2 * gathered)
        beyond = turn.first(_largest((moment + again) * self.repeating))
        beyond = beyond - turn.then(_stretches(alone))
        return np.maximum(_largest(moment), beyond)

    # --- what crosses

    @cached_property
    def _crossings(self) -> dict[str, tuple[int, int]]:
        """What later parts use of a captured part -> (that part, the last that uses it)."""
        dependent = set(self.graph.parameters.values())
        outputs = set(self.graph.outputs)
        found: dict[str, tuple[int, int]] = {}
        for op in self.graph.ops:
            if not dependent.intersection(op.operands):
                continue  # every stage can make it for itself
            dependent.update(op.results)
            for name in op.results:
                last = self.units - 1 if name in outputs else max(self.uses.get(name, [0]))
                if last > self.unit[op.name]:
                    found[name] = (self.unit[op.name], last)
        return found

    @cached_property
    def _sent(self) -> tuple[np.ndarray, np.ndarray]:
        sent, gradients = np.zeros(self.n + 1), np.zeros(self.n + 1)
        for name, (made, last) in self._crossings.items():
            size = self._bytes((name, self.flow.produced[name]))
            for at in self.spread(name, {*self.uses.get(name, ()), made, last}):
                if not at.get(made) or not at.get(last):
                    continue
                crossed = slice(min(at[made]) + 1, max(at[last]) + 1)
                sent[crossed] += size
                if self.graph.tensors[name].needs_grad:
                    gradients[crossed] += size
        return sent, gradients

    def _send_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Nothing where nothing crosses: at both ends of the model."""
        if PIPELINE_AXIS not in self.world.names:
            return np.zeros_like(sizes)
        seconds = collective_seconds(
            "send", before_bytes=sizes, after_bytes=sizes, ranks=2, link=self._link(PIPELINE_AXIS),
            hardware=self.hardware,
        )  # fmt: skip
        return np.where(sizes > 0, seconds, 0.0)


class _Work(NamedTuple):
    """Work of every block for one micro-batch, by region of the model and column.

    Attributes:
        forward, backward: seconds of shape `(n, 3, 5)`.
        recomputed: change of backward where the block is recomputed, see `Item.recomputed`.
        weights: seconds of backward that make gradients of parameters, of shape `(n,)`.
        once: seconds of gathers and reductions once a step, of shape `(n, 2)`.
    """

    forward: np.ndarray
    backward: np.ndarray
    recomputed: np.ndarray
    weights: np.ndarray
    once: np.ndarray

    @classmethod
    def nothing(cls, blocks: int) -> _Work:
        """Work of no seconds."""
        shape = (blocks, len(REGIONS), 5)
        zeros = (np.zeros(shape), np.zeros(shape), np.zeros(shape))
        return cls(*zeros, np.zeros(blocks), np.zeros((blocks, 2)))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The part of a whole; 0 where there is nothing."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)


class _Turn(NamedTuple):
    """Up to which block of every stage from i up to j blocks run again, and what is summed up to there.

    Attributes:
        begins, ends: i and j, of shape `(n + 1, n + 1)`.
        turns: the first block behind those that run again.
    """

    begins: np.ndarray
    ends: np.ndarray
    turns: np.ndarray

    @classmethod
    def of(cls, turns: Sequence[int]) -> _Turn:
        """Given that block for every block with which a stage can begin."""
        begins, ends = np.indices((len(turns), len(turns)))
        return cls(begins, ends, np.minimum(ends, np.array(turns)[:, None]))

    def first(self, sums: np.ndarray) -> np.ndarray:
        """Of the blocks that may run again; `sums` has what blocks i up to j have at `[i, j]`."""
        return sums[self.begins, self.turns]

    def then(self, sums: np.ndarray) -> np.ndarray:
        """Of the blocks behind those."""
        return sums[self.turns, self.ends]


def _alike(memories: Sequence[_Staying]) -> Iterator[_Staying]:
    """Memory that stays for the same blocks, summed up."""
    sums: dict[tuple[Any, ...], float] = {}
    for size, *where in memories:
        sums[tuple(where)] = sums.get(tuple(where), 0.0) + size
    for (kept, entering, spans), size in sums.items():
        yield _Staying(size, kept, entering, spans)


def _places(places: Places, units: Iterable[int]) -> tuple[int, ...]:
    """The blocks of the whole model for captured parts, ascending."""
    return tuple(sorted({at for unit in units for at in places.get(unit, ())}))


def _stretches(rows: np.ndarray) -> np.ndarray:
    """Sums over the rows from i up to j, at `[i, j]`; nothing where j comes first."""
    sums = np.concatenate([np.zeros((1, *rows.shape[1:])), np.cumsum(rows, axis=0)])
    return (
        np.maximum(0, sums[None] - sums[:, None])
        if (rows >= 0).all()
        else sums[None] - sums[:, None]
    )


def _has(units: Sequence[int], n: int) -> np.ndarray:
    """Whether one of some blocks lies from i up to j."""
    following = np.full(n + 1, n + 1)
    for unit in sorted(units, reverse=True):
        following[: unit + 1] = unit
    return following[:, None] < np.arange(n + 1)[None, :]


def _carries(made: int, last: int, n: int) -> np.ndarray:
    """Whether the stage from i up to j receives or sends what one block makes and a later one uses."""
    at = np.arange(n + 1)
    crosses = (made < at) & (at <= last)
    return (crosses[:, None] | crosses[None, :]) & (at[:, None] < at[None, :])


def _largest(values: np.ndarray) -> np.ndarray:
    """The largest of the blocks from i up to j."""
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for i in range(n):
        found[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return found
