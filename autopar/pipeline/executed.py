"""Time and memory of a plan with pipeline stages, by simulating its schedule.

Both are sums:

    step   = the simulated schedule + work of the slowest rank once per step + fixed time
    memory = the largest peak of a rank in the simulation + memory that tensors cannot use
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_model.items import FULL, TOUCHED, TrainingState
from autopar.cost_model.machines.hardware import Hardware
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.ir import Graph, Pipeline, Plan, Tier
from autopar.pipeline.parts import block_starts
from autopar.pipeline.schedules import actions, waits_for_sends
from autopar.pipeline.simulation import Simulation, StageCosts, simulate
from autopar.pipeline.stage_costs import StageTables
from autopar.pipeline.stage_table import StageTable
from autopar.pipeline.weight_stashing import with_versions


@dataclass(frozen=True)
class ExecutedStep:
    """A step of a plan that has a pipeline.

    Attributes:
        graph: the captured model, at the size of one micro-batch.
        plan: the plan with its stages.
        hardware: figures of the machine.
        training_state: gradients and optimizer states that training keeps for each parameter.
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
        costs = self.tables.costs(self.plan.recompute, [first for first, _ in self._edges[1:]], self.pipeline)
        return with_versions(costs, self.pipeline, self.plan.micro_batches)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule."""
        order = actions(self.pipeline, self.plan.micro_batches)
        waits = waits_for_sends(self.pipeline.schedule)
        return simulate(order, self.costs, waits_for_sends=waits)

    @cached_property
    def once_seconds(self) -> tuple[float, ...]:
        """For every pipeline rank, seconds of gathers, reductions and the optimizer after its schedule."""
        if self.pipeline.update_every:  # updates are part of the schedule
            return (0.0,) * self.pipeline.ranks
        ranks = map(self.pipeline.rank_of, range(self.pipeline.stages))
        tables = [self._table.on(rank) for rank in ranks]
        of_stage = [float(table.once_seconds[edge]) for table, edge in zip(tables, self._edges, strict=True)]
        return tuple(sum(of_stage[s] for s in stages) for stages in self._stages_of_ranks)

    @property
    def _stages_of_ranks(self) -> Iterator[tuple[int, ...]]:
        return (self.pipeline.stages_of(rank) for rank in range(self.pipeline.ranks))

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return self.simulation.step_seconds + max(self.once_seconds) + self._fixed_seconds

    @property
    def _fixed_seconds(self) -> float:
        return self.software.step_seconds + self.hardware.step_seconds

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the fullest rank, including memory that tensors cannot use."""
        return max(self.simulation.peak_bytes) + self.hardware.reserved_bytes

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        """For every stage the largest number of micro-batches between their forward and their backward."""
        most, now = [0] * self.pipeline.stages, [0] * self.pipeline.stages
        for action in itertools.chain.from_iterable(actions(self.pipeline, self.plan.micro_batches)):
            now[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)

    def stored_bytes(self, tier: Tier) -> float:
        """Bytes that the fullest rank stores in the tier host or nvme."""
        held = self.tables.memory.held(dict.fromkeys(TOUCHED, 1), tier)
        saved, flights = self.tables.memory.saved_in(tier), self._in_flight
        of_stage = [float(held[edge] + flights[stage] * saved[edge]) for stage, edge in enumerate(self._edges)]
        return max(sum(of_stage[s] for s in stages) for stages in self._stages_of_ranks)
