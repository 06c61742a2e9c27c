"""Where the time and memory of a plan with pipeline stages go, rank by rank and stage by stage.

The closed form of `autopar.cost_model.steps.step` gives every stage the same share of the layers. Here stages
are those that the plan cuts; `autopar.pipeline.executed` has their sums.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import sympy

from autopar.cost_model.breakdown import Breakdown, Event, Unit
from autopar.cost_model.items import COMPUTE, WorkItem
from autopar.cost_model.memory import Selected
from autopar.cost_model.steps.run import Run, total
from autopar.cost_model.steps.step import Step
from autopar.ir.recompute import Selection, words_of_recompute
from autopar.pipeline.executed import ExecutedStep
from autopar.pipeline.parts import repeating_parts
from autopar.pipeline.recomputable import selected
from autopar.pipeline.schedules import splits_backward
from autopar.pipeline.simulation import StageCosts
from autopar.pipeline.stage_bytes import KEPT
from autopar.search.stages.shape import Shape
from autopar.units import counted
from autopar.views import gantt
from autopar.views.page import StageRow

Direction = Literal["forward", "backward"]
_ROUNDING = 1e-9  # of a sum
_ALIKE = 1.0005  # times that print as the same


@dataclass(frozen=True)
class SimulatedStep(ExecutedStep):
    """A step of a plan that has a pipeline, with where its time and memory go."""

    @property
    def fullest_rank(self) -> int:
        peaks = self.simulation.peak_bytes
        return peaks.index(max(peaks))

    @property
    def busiest_rank(self) -> int:
        busy = self.simulation.busy_seconds
        return busy.index(max(busy))

    @property
    def slowest_stage(self) -> int:
        """The one whose micro-batch takes longest, forward and backward."""
        seconds = [cost.forward_seconds + self._backward_seconds(stage) for stage, cost in enumerate(self.costs)]
        return seconds.index(max(seconds))

    @property
    def closed_bubble(self) -> float | None:
        """Fraction of a step that ranks idle, for equal stages and sends that take no time.

        (p - 1) / (v m + p - 1) for p ranks, v chunks and m micro-batches (Huang et al. 2019, section 2.3;
        Narayanan et al. 2021, section 2.2). None for schedules that split a backward in two, which have no
        such formula.
        """
        if splits_backward(self.pipeline):
            return None
        waits = self.pipeline.ranks - 1
        return waits / (self.pipeline.chunks * self.plan.micro_batches + waits)

    @property
    def closed_bubble_text(self) -> str:
        """The formula in words, such as `(p - 1) / (m + p - 1)`."""
        m = "m" if self.pipeline.chunks == 1 else "v m"
        return f"(p - 1) / ({m} + p - 1)"

    # --- stages

    @cached_property
    def stages(self) -> tuple[StageRow, ...]:
        """A row for every stage, in the graph's order."""
        flights = self._shape.in_flight()
        return tuple(
            self._row(stage, cost, flight) for stage, (cost, flight) in enumerate(zip(self.costs, flights, strict=True))
        )

    @property
    def _shape(self) -> Shape:
        p = self.pipeline
        return Shape(p.ranks, p.chunks, p.schedule, self.plan.micro_batches)

    def _row(self, stage: int, cost: StageCosts, flight: int) -> StageRow:
        rank, (begin, end) = self.pipeline.rank_of(stage), self._edges[stage]
        names = [name for name in map(self._module, range(begin, end)) if name]
        layers = {name for name in names if self.graph.stack_of(name)}
        return StageRow(
            stage,
            rank,
            first=names[0] if names else "",
            last=self._last_module(end - 1) or (names[-1] if names else ""),
            layers=len(layers),
            parameters=sum(self._numel(name) * self._copies(name, stage) for name in self.graph.parameters),
            forward_seconds=cost.forward_seconds,
            backward_seconds=self._backward_seconds(stage),
            send_seconds=cost.send_forward_seconds if self._leaves(stage, stage + 1) else 0.0,
            gradient_seconds=cost.send_backward_seconds if self._leaves(stage, stage - 1) else 0.0,
            in_flight=flight,
            saved_bytes=cost.saved_bytes,
            kept_bytes=cost.kept_bytes,
            rank_bytes=self.simulation.peak_bytes[rank],
        )

    def _module(self, place: int) -> str:
        """Path of the layer, or of the first module, that a block of the whole model is."""
        repetition, part = self.tables.repetition, self.tables.parts[place]
        if repetition.groups:
            return repetition.module(place)
        return repetition.blocks[part.block].module

    def _last_module(self, place: int) -> str:
        """Path of the layer, or of the last module, that a block of the whole model is; "" where none is."""
        repetition, parts = self.tables.repetition, self.tables.parts
        few = bool(repetition.groups)
        number = parts[place].captured if few else place
        starts = [each.start for each in (repetition.blocks if few else parts)]
        if repetition.blocks[number if few else parts[place].block].repeats:
            return self._module(place)
        ops = itertools.dropwhile(lambda op: op.name != starts[number], self.graph.ops)
        ends = starts[number + 1 : number + 2]
        modules = [op.module for op in itertools.takewhile(lambda op: op.name not in ends, ops)]
        return next((module for module in reversed(modules) if module), "")

    def _copies(self, name: str, stage: int) -> int:
        """Number of the parameters that a captured one stands for in a stage."""
        tensor, (begin, end) = self.graph.parameters[name], self._edges[stage]
        spread = self.tables.blocks.spread(tensor, self.tables.blocks.uses.get(tensor, []))
        return sum(any(begin <= at < end for places in each.values() for at in places) for each in spread)

    def _leaves(self, stage: int, other: int) -> bool:
        """Whether there is another stage, and on another rank."""
        inside = 0 <= other < self.pipeline.stages
        return inside and self.pipeline.rank_of(other) != self.pipeline.rank_of(stage)

    def _numel(self, name: str) -> int:
        tensor = self.graph.tensors[self.graph.parameters[name]]
        return math.prod(tensor.shape)

    @property
    def events(self) -> tuple[Event, ...]:
        """The schedule, and behind it what each rank does once a step; the last event ends when the step does."""
        end_seconds, what = self.simulation.step_seconds, "gathers, reductions, optimizer"
        once = (Event(f"rank {rank}", what, end_seconds, seconds) for rank, seconds in enumerate(self.once_seconds))
        fixed = Event("rank 0", "fixed", end_seconds + max(self.once_seconds), self._fixed_seconds)
        return *gantt.events(self.simulation), *(each for each in (*once, fixed) if each.duration_seconds)

    # --- trees

    @cached_property
    def time(self) -> Breakdown:
        """Seconds of a step on the rank that computes longest, and of the slowest rank's work once per step."""
        rank, run = self.busiest_rank, self.simulation
        idle = run.step_seconds - run.busy_seconds[rank]
        parts = (
            self._direction("forward", rank),
            self._direction("backward", rank),
            self._updates(rank),
            _leaf("waiting for other stages", "seconds", idle, f"rank {rank}, the busiest"),
            _leaf("once a step", "seconds", max(self.once_seconds), "gathers, reductions, optimizer"),
            _leaf("fixed", "seconds", self._fixed_seconds),
        )
        return _sum("step", "seconds", parts, "simulated")

    def _updates(self, rank: int) -> Breakdown:
        """The updates that the schedule itself makes, under one without a flush."""
        count = sum(each.action.kind == "U" and each.rank == rank for each in self.simulation.timed)
        seconds = sum(self.costs[s].update_seconds for s in self.pipeline.stages_of(rank))
        note = f"{count} of rank {rank}: reductions, optimizer"
        return _leaf("updates", "seconds", count * seconds, note)

    def _direction(self, direction: Direction, rank: int) -> Breakdown:
        """All forwards or backwards of a rank by what they go to; the rest is of the host, or hidden."""
        m, stages = self.plan.micro_batches, self.pipeline.stages_of(rank)
        whole = m * sum(getattr(self.costs[s], f"{direction}_seconds") for s in stages)
        sums = dict[str, float]()
        if direction == "backward" and (extra := sum(map(self._split_seconds, stages))):
            sums, whole = {"split in two halves": extra}, whole + extra
        for item in self.tables.on(rank).blocks.items:
            times = m * self._times(item, direction, stages)
            if times:
                name = "compute" if item.resource == COMPUTE else f"communication along {item.resource}"
                sums[name] = sums.get(name, 0.0) + times * float(item.count * item.seconds)
        rest = whole - sum(sums.values())
        if abs(rest) > _ROUNDING * whole:
            sums["waiting for the host" if rest > 0 else "hidden behind compute"] = rest
        parts = [_leaf(name, "seconds", value) for name, value in sums.items()]
        return _sum(direction, "seconds", parts, f"{counted(m, 'micro-batch')} on rank {rank}, the busiest")

    def _backward_seconds(self, stage: int) -> float:
        """Mean duration of a micro-batch's backward on a stage, in halves or whole."""
        whole = self.costs[stage].backward_seconds
        return whole + self._split_seconds(stage) / self.plan.micro_batches

    def _split_seconds(self, stage: int) -> float:
        """Seconds of a step that the backwards of a stage take beyond whole ones, where the schedule splits them."""
        return self._splits[stage] * self.costs[stage].split_seconds

    @cached_property
    def _splits(self) -> Counter[int]:
        """Number of micro-batches whose backward runs in two halves, by stage; DualPipeV splits some of them."""
        timed = self.simulation.timed
        return Counter(each.action.stage for each in timed if each.action.kind == "I")

    def _times(self, item: WorkItem, direction: Direction, stages: Sequence[int]) -> float:
        """Executions of an item in one direction of a micro-batch, as a part of those of the whole model.

        Recomputation is part of backward.
        """
        if item.phase in ("gather", "reduce", "update") and not item.every_micro_batch:
            return 0.0
        rows, share = self.tables.blocks.rows_of(item)
        here = [row for row in rows if self._homes[row] in stages]
        if direction == "forward":
            return share * len(here) * (item.phase == "forward")
        again = self._recomputed(item, here)
        return share * (len(here) * (item.phase != "forward") + again)

    def _recomputed(self, item: WorkItem, here: Sequence[int]) -> int:
        """Number of executions that recomputation adds to an item's in some blocks."""
        if self._selected is not None:
            repeats = self._selected.repeats(item.of, item.moves, item.phase, item.carries)
            return repeats * len(here)
        return item.recomputed * len(self._again.intersection(here))

    @cached_property
    def _selected(self) -> Selected | None:
        recompute = self.plan.recompute
        if not isinstance(recompute, Selection):
            return None
        return selected(self.graph, self.plan, recompute)

    @cached_property
    def _again(self) -> frozenset[int]:
        """Blocks that are recomputed in backward."""
        return repeating_parts(self.graph, self.plan)[1]

    @cached_property
    def _homes(self) -> tuple[int, ...]:
        """The stage of every block."""
        return tuple(stage for stage, (begin, end) in enumerate(self._edges) for _ in range(begin, end))

    @cached_property
    def memory(self) -> Breakdown:
        """Peak bytes of the fullest rank."""
        rank = self.fullest_rank
        kept = [*(self._kept(kind, rank) for kind in KEPT), self._further_versions(rank)]
        moving = self.simulation.peak_bytes[rank] - sum(part.value for part in kept)
        saved = "of micro-batches in flight, and of the stage that is running"
        reserved = self.hardware.reserved_bytes
        parts = (
            *kept,
            _leaf("saved activations", "bytes", moving, saved),
            _leaf("reserved", "bytes", reserved, "context and library buffers"),
        )
        return _sum(f"memory of pipeline rank {rank}", "bytes", parts, "simulated")

    def _kept(self, kind: str, rank: int) -> Breakdown:
        stages = self.pipeline.stages_of(rank)
        held = self.tables.memory.held({kind: 1})
        return _of_stages(kind, "bytes", {s: float(held[self._edges[s]]) for s in stages}, "")

    def _further_versions(self, rank: int) -> Breakdown:
        """Versions of the rank's parameters besides the newest."""
        further = self._shape.further_versions
        stages = self.pipeline.stages_of(rank)
        sizes = {s: float(further[s] * self.costs[s].version_bytes) for s in stages}
        count = int(sum(further[s] for s in stages))
        return _of_stages("weight versions", "bytes", sizes, f"{count} besides the newest")

    @cached_property
    def traffic(self) -> Breakdown:
        """Bytes that the rank which sends most between stages sends there in a step."""
        ranks = [self._sent(rank) for rank in range(self.pipeline.ranks)]
        return max(ranks, key=lambda tree: tree.value)

    def _sent(self, rank: int) -> Breakdown:
        m, stages = self.plan.micro_batches, self.pipeline.stages_of(rank)
        ends = [self._edges[s][1] for s in stages if self._leaves(s, s + 1)]
        begins = [self._edges[s][0] for s in stages if self._leaves(s, s - 1)]
        activations = m * sum(float(self._table.sent_bytes[k]) for k in ends)
        gradients = m * sum(float(self._table.gradient_bytes[k]) for k in begins)
        parts = (_leaf("activations", "bytes", activations), _leaf("gradients", "bytes", gradients))
        return _sum("along pp", "bytes", parts, f"of pipeline rank {rank}, which sends most")

    @property
    def traffic_bytes(self) -> float:
        """Bytes that a rank sends in a step, between stages and inside one, without a tree of formulas."""
        plan, layers = self.plan, sum(stack.layers for stack in self.graph.stacks) or 1
        run = Run(plan.micro_batches, self.pipeline.ranks, recompute=plan.recompute)
        step = Step(tuple(self.tables.blocks.items), (), run, self.hardware, self.software, layers=layers)
        return float(total(step.traffic())) + self.traffic.value

    # --- sentences

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences about the pipeline: its schedule, its idle time, its slowest stage, and its fullest rank."""
        return (self._is_what, self._idles, self._slowest, self._fullest)

    @property
    def _is_what(self) -> str:
        p = self.pipeline
        chunks = f", {p.chunks} stages a rank" if p.chunks > 1 else ""
        again = f", {words}" if (words := words_of_recompute(self.plan.recompute, p.stages)) else ""
        return (
            f"pp={p.ranks} runs {p.stages} stages by {p.schedule}{chunks}, "
            f"{counted(self.plan.micro_batches, 'micro-batch')}{again}; stages begin at "
            f"{', '.join(('the first op', *p.cuts))}"
        )

    @property
    def _idles(self) -> str:
        measured = _percent(self.simulation.bubble_fraction)
        if self.closed_bubble is None:
            return (
                f"ranks idle {measured} of the simulated schedule on average (the bubble); "
                f"{self.pipeline.schedule} splits backward, for which there is no closed form"
            )
        return (
            f"ranks idle {measured} of the simulated schedule on average (the bubble); with equal stages and free "
            f"sends, the closed form {self.closed_bubble_text} gives {_percent(self.closed_bubble)}"
        )

    @property
    def _slowest(self) -> str:
        row = self.stages[self.slowest_stage]
        mean = sum(each.seconds for each in self.stages) / len(self.stages)
        busiest = f"; rank {self.busiest_rank} computes longest" if self.pipeline.chunks > 1 else ""
        if row.seconds <= _ALIKE * mean:
            return f"all stages take as long{busiest}"
        return (
            f"stage {row.number} ({row.where}) is slowest, {_percent(row.seconds / mean - 1)} above the "
            f"mean of the stages{busiest}"
        )

    @property
    def _fullest(self) -> str:
        rank = self.fullest_rank
        rows = [self.stages[s] for s in self.pipeline.stages_of(rank)]
        flights = " and ".join(f"{row.in_flight} on stage {row.number}" for row in rows)
        return f"rank {rank} binds memory: its micro-batches in flight are at most {flights}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _leaf(name: str, unit: Unit, value: float, note: str = "") -> Breakdown:
    return Breakdown(name, unit, sympy.Float(value), float(value), note=note)


def _of_stages(name: str, unit: Unit, values: Mapping[int, float], note: str) -> Breakdown:
    """A cost of a rank's stages; of a single one without parts."""
    if len(values) == 1:
        return _leaf(name, unit, sum(values.values()), note)
    parts = (_leaf(f"stage {stage}", unit, value) for stage, value in values.items())
    return _sum(name, unit, parts, note)


def _sum(name: str, unit: Unit, parts: Iterable[Breakdown], note: str = "") -> Breakdown:
    """The sum of parts, those of nothing left out, largest first."""
    kept = tuple(sorted((p for p in parts if p.value), key=lambda p: (-p.value, p.name)))
    value = sum(part.value for part in kept)
    return Breakdown(name, unit, sympy.Float(value), value, kept, note)
