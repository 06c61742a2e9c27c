"""The work and memory of a plan, attributed to the blocks of the whole model.

A graph may have fewer layers than the model. A captured part of a middle layer then stands for several parts of the
whole model, see `autopar.pipeline.repetition`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np

from autopar.cost_model import Hardware, Link, Sizes
from autopar.cost_model.buckets import buckets_hide
from autopar.cost_model.items import FULL, TrainingState, WorkItem
from autopar.cost_model.machines.software import AUTOPAR, Software
from autopar.cost_model.owners import positions_of_owners
from autopar.cost_model.pricer import Pricer
from autopar.cost_model.steps.run import Run
from autopar.cost_model.steps.step import Step
from autopar.ir import Graph, Mesh, Plan
from autopar.pipeline.parts import block_starts, find_parts
from autopar.pipeline.producers import Memory
from autopar.pipeline.repetition import Places, Repetition
from autopar.pipeline.saved_values import SavedValues


class PricedBlocks:
    """A plan's work (items) and memory (holdings), with the blocks to which they belong.

    The arguments are those of `autopar.pipeline.stage_costs.StageTables`.

    Attributes:
        parts: the blocks of the whole model in order; a block that a stage boundary cuts is two parts.
        starts: name of the first op of every part.
        unit: op name -> index of its captured part.
        repeating: for every part whether it may be recomputed, of shape `(n,)`.
        unit_repeats: index of a captured part -> whether it may be recomputed.
        n: number of parts.
        units: number of captured parts.
        uses: tensor name -> the captured parts whose ops use the tensor, in ascending order.
        slices: tensors that blocks save in slices, for the plan's own cuts.
        items: priced work and communication of the captured ops.
        holdings_of_ranks: memory of parameters, gradients and optimizer states, and other memory of the plan, of
            every rank that owns parameters; of one rank where all ranks hold as much.
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
    ) -> None:
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
        self.slices = SavedValues(graph, plan).slices
        self.pricer = Pricer(
            graph,
            plan,
            sizes=Sizes(plan.mesh),
            hardware=self.hardware,
            training_state=training_state,
            links=[self.link(axis) for axis in plan.mesh.names],
            blocks=self.unit,
            slices=self.slices,
        )
        self.flow, self.sizes = self.pricer.flow, self.pricer.sizes
        self.items = list(self.pricer.items())
        owners = positions_of_owners(plan)
        self.holdings_of_ranks = [list(self.pricer.at(owner).holdings()) for owner in owners]
        run, hidden = Run(plan.micro_batches), buckets_hide(graph, plan, self.flow, self.world)
        self.step = Step((), (), run, self.hardware, software, buckets_hide=hidden)
        self._rows: dict[tuple[str, str], tuple[list[int], float]] = {}

    @property
    def repeating_blocks(self) -> int:
        """Number of blocks that may be recomputed."""
        return len({part.block for part in self.parts if part.may_repeat})

    def link(self, axis: str) -> Link:
        """The link of a mesh axis. The mesh of a stage of one rank has an axis that the mesh of all ranks lacks."""
        names = self.world.names
        if axis not in names:
            return self.hardware.axis_link(1, 1, self.world.size)
        return self.hardware.link(self.world, names.index(axis))

    def _uses(self) -> dict[str, list[int]]:
        """Tensor name -> the captured parts whose ops use the tensor, in ascending order."""
        found: dict[str, list[int]] = {}
        for op in self.graph.ops:
            for name in op.operands:
                at = found.setdefault(name, [])
                if not at or at[-1] != self.unit[op.name]:
                    at.append(self.unit[op.name])
        return found

    def rows_of(self, item: WorkItem) -> tuple[list[int], float]:
        """The blocks of the whole model to which an item belongs, and the fraction of its count in each of them."""
        key = (item.moves, item.of)
        if key not in self._rows:
            self._rows[key] = self._find_rows(item)
        return self._rows[key]

    def _find_rows(self, item: WorkItem) -> tuple[list[int], float]:
        if item.moves:
            unit = self.unit.get(item.of, self.units - 1)  # the default is the end of the graph
            found = self.spread(item.moves, {*self.uses.get(item.moves, ()), unit})
            return [min(at[unit]) for at in found if at.get(unit)], 1 / self.times(item.moves)
        if item.of in self.unit:
            return self.all_of(self.unit[item.of]), 1 / self.times(item.of)
        if item.of in self.graph.parameters:
            units = self.uses.get(self.graph.parameters[item.of], [0])
            found = self.spread(self.graph.parameters[item.of], units)
            return [min(at[units[0]]) for at in found], 1 / self.times(item.of)
        return [self.n - 1], 1.0  # the end of the graph

    def times(self, name: str) -> int:
        """Number of ops, tensors or parameters of the whole model that a captured one stands for."""
        return self.graph.layer_count.get(name, 1)

    def all_of(self, unit: int) -> list[int]:
        """The blocks that a captured part stands for."""
        return list(self.repetition.all_of(unit)) if self.repetition.groups else [unit]

    def spread(self, name: str, units: Collection[int]) -> Sequence[Places]:
        """The blocks that compute or use each tensor for which a captured tensor stands; see `Repetition.spread`."""
        if not self.repetition.groups:
            return [{unit: (unit,) for unit in units}]
        producer = self.graph.producer.get(name)
        made = self.unit[producer.name] if producer else None
        owner = min(units) if producer is None and name in self._owned else None
        return self.repetition.spread(made, owner, units)

    @cached_property
    def _owned(self) -> frozenset[str]:
        """Tensor names of the parameters and buffers of captured layers that stand for several layers."""
        graph = self.graph
        leaves = {**graph.parameters, **graph.buffers}
        return frozenset(
            tensor for name, tensor in leaves.items() if (place := graph.stack_of(name)) and place[1] == place[0].middle
        )

    def bytes(self, memory: Memory) -> float:
        """Bytes of a tensor on a rank, given its name and its layout."""
        name, layout = memory
        return float(self.sizes.bytes(self.graph.tensors[name], layout))
