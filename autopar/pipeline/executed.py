"""A plan with pipeline stages, run action by action: the time and memory of its step.

Stages are those that the plan cuts, and micro-batches go through them as the schedule says:

    step   = the simulated schedule + what the slowest rank does once + what is fixed
    memory = the largest peak of a rank in the simulation + what no tensor can have
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.hardware import Hardware
from autopar.cost_model.items import FULL, TOUCHED, TrainingState
from autopar.cost_model.software import AUTOPAR, Software
from autopar.ir import Graph, Pipeline, Plan, Tier
from autopar.pipeline.parts import block_starts
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.pipeline.versions import with_versions


@dataclass(frozen=True)
class ExecutedStep:
    """A step of a plan that has a pipeline.

    Attributes:
        graph: the captured model, at the size of one micro-batch.
        plan: its choices, with the cuts.
        hardware: the machine that the stages are priced for.
        training_state: bytes that training keeps in addition to parameters.
        software: figures of the runtime.
    """

    graph: Graph
    plan: Plan
    hardware: Hardware
    training_state: TrainingState = FULL
    software: Software = AUTOPAR

    @property
    def pipeline(self) -> Pipeline:
        """The stages of the plan and their schedule."""
        assert self.plan.pipeline is not None, "only a plan with stages is simulated"
        return self.plan.pipeline

    @cached_property
    def tables(self) -> StageTables:
        """Prices of all stretches of blocks of the whole model."""
        return StageTables(
            self.graph,
            self.plan,
            self.hardware,
            starts=sorted({*block_starts(self.graph), *self.pipeline.cuts}),
            training_state=self.training_state,
            software=self.software,
        )

    @cached_property
    def _table(self) -> StageTable:
        return self.tables.at(self.plan.recompute)

    @cached_property
    def _edges(self) -> tuple[tuple[int, int], ...]:
        """For every stage its first block, and the first block of the next stage."""
        starts = self.tables.starts
        cuts = [starts.index(name) for name in self.pipeline.cuts]
        return tuple(itertools.pairwise((0, *cuts, len(starts))))

    @cached_property
    def costs(self) -> tuple[StageCosts, ...]:
        """Costs of every stage for one micro-batch."""
        costs = [self._table.stage(*edge) for edge in self._edges]
        return with_versions(costs, self.pipeline, self.plan.micro_batches)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule as it runs."""
        order = actions(self.pipeline, self.plan.micro_batches)
        waits = waits_for_sends(self.pipeline.schedule)
        return simulate(order, self.costs, waits_for_sends=waits)

    @cached_property
    def once_seconds(self) -> tuple[float, ...]:
        """Gathers, reductions and the optimizer of every pipeline rank after its schedule, once a step."""
        if self.pipeline.update_every:  # the schedule has them
            return (0.0,) * self.pipeline.ranks
        of_stage = [float(self._table.once_seconds[edge]) for edge in self._edges]
        return tuple(sum(of_stage[s] for s in stages) for stages in self._stages_of_ranks)

    @property
    def _stages_of_ranks(self) -> Iterator[tuple[int, ...]]:
        return (self.pipeline.stages_of(rank) for rank in range(self.pipeline.ranks))

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return self.simulation.step_seconds + max(self.once_seconds) + self.software.step_seconds

    @property
    def memory_bytes(self) -> float:
        """Peak of the fullest rank, with the memory that no tensor can have."""
        return max(self.simulation.peak_bytes) + self.hardware.reserved_bytes

    def stored_bytes(self, tier: Tier) -> float:
        """What the fullest rank keeps in a tier besides the device."""
        held = self.tables.memory.held(dict.fromkeys(TOUCHED, 1), tier)
        of_stage = [float(held[edge]) for edge in self._edges]
        return max(sum(of_stage[s] for s in stages) for stages in self._stages_of_ranks)
